"""Colours of the page's figures: those of autoshard's other pictures, so that one thing has one colour everywhere."""

from autoshard.comparison.picture import COMPUTE, MEMORY_COLOURS, TIME_COLOURS

PRODUCTS, OTHER_KERNELS = "#5b6b82", "#a3adbc"
_ORDER = ("state", "inputs", "intermediates", "resharded copies", "partial sums", "workspaces")
MEMORY = {kind: MEMORY_COLOURS[kind] for kind in _ORDER}
"""What stays all the time lies at the bottom of a stack."""
COLLECTIVES = {kind: colour for kind, colour in TIME_COLOURS.items() if kind != COMPUTE}
TIME = TIME_COLOURS | {COMPUTE: PRODUCTS}
OTHER = "#8a8a8a"
OWN, OTHERS, BOUND, LIMIT = "#0072b2", "#a3adbc", "#009e73", "#d55e00"
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
"""Okabe and Ito, "Color Universal Design", 2008."""
