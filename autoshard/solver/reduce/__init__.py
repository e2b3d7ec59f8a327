"""Reductions: from a `Problem` to an equal, smaller cost function network, and back (postsolve).

In goes a problem; out comes a `Network` whose optimum is the problem's. Literature: variable elimination (Bertele and
Brioschi 1972) and dead-end elimination (Goldstein 1994) as in solvers of cost function networks; colour refinement of
problems with repeated structure (Grohe, Kersting, Mladenov and Selman 2014).
"""
