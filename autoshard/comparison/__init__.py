"""A plan beside the strategies that people write by hand: figures, a table, JSON and a picture."""
