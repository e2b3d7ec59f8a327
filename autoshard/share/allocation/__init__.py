"""The decision as data: jobs, their choices and nodes as an integer program, and its solution."""
