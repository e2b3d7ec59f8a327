"""What the backward pass keeps and what it computes again: the layers of a loss, policies for them, its rewriting.

In: the loss function of a `TrainStep`. Out: its runs of repeated layers (`layers.py`), policies for them as data
(`policy.py`), and a loss function that obeys one through `jax.checkpoint` (`rewrite.py`). Which policy is best is
decided in `autoshard/plans/variant_search.py`.
"""
