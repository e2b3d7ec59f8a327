"""The plan beside the strategies that people write by hand: figures, a table, JSON and a picture."""

from autoshard.comparison.compare import Comparison, Contender, compare

__all__ = ["Comparison", "Contender", "compare"]
