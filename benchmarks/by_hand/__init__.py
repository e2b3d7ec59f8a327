"""Parallel training as people write it by hand with JAX alone: what plans are compared with in `exposed.py`."""
