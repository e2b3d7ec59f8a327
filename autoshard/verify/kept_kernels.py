"""Kernels that XLA:GPU compiles once, while one program is compiled in several ways."""

import contextlib
import pathlib
import tempfile
from collections.abc import Iterator

import jax

from autoshard.compiler.kernel_cache import kernel_cache_options
from autoshard.compiler.options import GPU_PLATFORMS


@contextlib.contextmanager
def kernels_kept(platform: str) -> Iterator[dict[str, str | bool]]:
    """Compiler options with which the kernels of each program that is compiled in the block are kept for the next ones.

    The ways to schedule a program differ in the order of its kernels, and hardly in the kernels. There are no such
    options where JAX keeps whole programs (`jax_compilation_cache_dir`): it would know none of them by the name of a
    file that is gone. Only where nothing runs: how a GPU does with kernels from such a file was not tried.

    Args:
      platform: What JAX calls the devices.
    """
    if platform not in GPU_PLATFORMS or jax.config.jax_compilation_cache_dir:  # pyright: ignore[reportAttributeAccessIssue]: JAX adds it later
        yield {}
        return
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        yield kernel_cache_options(str(pathlib.Path(folder) / "kernels"))
