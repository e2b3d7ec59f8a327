"""Bounds: from a `FactorGraph` to a proven lower bound, with the prices and messages that prove it.

The dual of the linear relaxation over the local polytope is raised by message passing (TRW-S and SRMP, Kolmogorov 2006
and 2015) and by prices on the capacity (Lagrangian relaxation; the volume algorithm, Barahona and Anbil 2000). Labels
decoded on the way are where the primal side begins.
"""
