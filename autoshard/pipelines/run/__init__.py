"""Runs a `PipelinePlan`: one thread of each process dispatches the tasks in the order of the simulated timeline.

In: a `PipelinePlan`, the `TrainStep` that it was made from, devices. Out: a `StagedFunction`, `(state, batch) ->
(state, metrics)`: the phases of each stage are jitted on its submesh, and the optimizer's update runs where parameters
are owned.
"""
