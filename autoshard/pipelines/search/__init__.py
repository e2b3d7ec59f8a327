"""Which layers run on which devices, in how many replicas and stages, with which schedule and share of the batch.

In: `Layers`, a `CostTable`, a cluster, `StageOptions`. Out: the best `Arrangement` by the schedule simulator, a bound
that no arrangement of the searched space is below, and the alternatives that were looked at. It knows no JAX program.
"""
