"""Which JAX is installed, by which XLA's options have other names."""

import importlib.metadata
import re


def jax_version() -> tuple[int, ...]:
    """The first three numbers of JAX's version."""
    return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("jax"))[:3]))
