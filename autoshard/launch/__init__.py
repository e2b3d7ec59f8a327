"""Supervision of a run: starts its workers, notices what is lost, and starts the next generation.

Nothing here imports JAX: the supervisor starts at once and outlives whatever happens to its workers. Computation over
hosts is JAX's business, inside the workers; processes on other hosts are the engine's.
"""
