"""Annotations inside model or loss code that guide the search: `replicate`, `split`, `pipeline` and `stage`.

A block of code says how it is to be run; what it says binds the planner, and what it leaves open is planned. The idea
and the four names are Whale's (Jia et al., arXiv:2011.09208; USENIX ATC 2022); that a few annotations are completed to
a whole plan is Paddle's (arXiv:2112.02752).

A block is a name scope of JAX whose name tells what is asked for. So it survives `grad`, `vmap`, `scan`, `jit` and
`jax.checkpoint`, costs nothing, and means nothing to who does not read it.
"""
