"""Plans of steps over several meshes: made, stored, explained, compared.

In: an `Arrangement` (searched or given) and the priced layers. Out: a `PipelinePlan`, data only: the plan of each
distinct stage, the owner of each parameter, durations of everything, and how good the arrangement is; files of it are
versioned.
"""
