"""The primitives that several laws name."""

PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})
"""Matrix products and convolutions."""
SUMS = frozenset({"add", "add_any"})
"""Additions of two tensors."""
