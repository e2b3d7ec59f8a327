"""Embedding tables in the memory of the host: worker processes own their rows, and the step runs on those of a batch.

Kept light, since the worker processes import it: they need NumPy alone.
"""
