"""The primitives that models spend their arithmetic on."""

from autoshard.trace.rules.attention import FUSED

PRODUCTS = FUSED | {"dot_general", "conv_general_dilated", "ragged_dot_general"}
"""Matrix products, convolutions, and attention that has both its products in one kernel."""
