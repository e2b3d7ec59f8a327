"""Which embedding table lives where: in the memory of accelerators, in that of the host, or hot rows here, cold there.

A decision, made and explained ahead of a run, with the mode of execution and the CPUs that it needs.
"""
