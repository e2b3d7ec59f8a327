"""What layers cost: each kind of layer is planned once on every mesh that a stage could have.

In: a training step, a cluster, micro-batch sizes. Out: `Layers` (what crosses between them, which weights they share)
and a `CostTable` of times and bytes; `IntervalCostTable` sums these for every interval of consecutive layers.
"""
