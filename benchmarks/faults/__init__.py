"""Faults on purpose: supervised runs as real processes, what is done to them, and what must hold afterwards."""
