"""Embedding tables of a training step: the look-ups in its loss, the step over the rows of one batch, sparse updates.

tables = find_tables(step, state, batch)    # what is a table, and why what looks like one is not
sparse = sparse_step(step, state, batch)    # the same step over the rows that a batch reads
whole = sparse_on_devices(step, state, batch)    # and over whole tables on devices, with sparse gradients
cuts = find_cuts(step, state, batch)    # behind which values the loss can go on elsewhere than where it began
"""

from autoshard.tables.cuts import Cut, Cuts, DenseParam, find_cuts
from autoshard.tables.find import find_tables
from autoshard.tables.frequent_rows import frequent_rows
from autoshard.tables.look_ups import LookUp, NotATable, Table, Tables
from autoshard.tables.on_devices import SparseOnDevices, sparse_on_devices
from autoshard.tables.row_updates import RowUpdate, row_updates
from autoshard.tables.sparse_step import SparseStep, sparse_step

__all__ = [
    "Cut",
    "Cuts",
    "DenseParam",
    "LookUp",
    "NotATable",
    "RowUpdate",
    "SparseOnDevices",
    "SparseStep",
    "Table",
    "Tables",
    "find_cuts",
    "find_tables",
    "frequent_rows",
    "row_updates",
    "sparse_on_devices",
    "sparse_step",
]
