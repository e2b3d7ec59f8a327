"""From a traced loss or update to the programs of stages and submeshes; the only room of the wing that cuts jaxprs.

In: a `TrainStep` with shapes, or the closed jaxpr of an update and where its inputs lie. Out: a `Forward` program with
its `LayerBoundaries`, the joint program of any interval of layers (`JointFunction`), its partition into forward,
backward and weight phases (`PhasePartition`), and an `MpmdProgram` of an update whose values lie on several submeshes.
"""
