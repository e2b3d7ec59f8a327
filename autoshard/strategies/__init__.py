"""Data parallelism, ZeRO, tensor and expert parallelism and their mixes, as restrictions of the planner's problem."""
