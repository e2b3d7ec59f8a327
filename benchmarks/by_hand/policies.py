"""What all layers of a model keep for the backward pass, as people write it by hand."""

from autoshard.remat.policy import Keep

POLICIES = {"nothing recomputed": Keep.ALL, "dots kept": Keep.WEIGHT_PRODUCTS, "all recomputed": Keep.INPUTS}
"""No `jax.checkpoint`; around each layer with `dots_with_no_batch_dims_saveable`; around each layer."""
