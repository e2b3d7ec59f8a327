"""Lets the tests of this folder import `zoo_checks`, which they share, and compiles their programs quickly."""

import pathlib
import sys
from collections.abc import Iterator

import jax
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def quick_compilation() -> Iterator[None]:
    """The programs here are tiny and run a few times; what takes time is to compile them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
