"""XLA:GPU's compiler in a process where JAX has left it out.

Where JAX may use GPUs (`JAX_PLATFORMS` does not say otherwise), its CUDA plugin looks for cuDNN when a program first
asks for devices. Machines without a GPU have none; JAX prints a traceback then and does without the plugin, whose
compiler needs no cuDNN. There is no public way to ask again. So this file calls what JAX called, the `initialize` of
the plugin, without that check (`JAX_SKIP_CUDA_CONSTRAINTS_CHECK`).
"""

import os

PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"
"""The modules of JAX's CUDA plugins, the newest first."""

_UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def register() -> None:
    """Registers the newest CUDA plugin that is installed, which JAX has left out, so that its compiler can be asked.

    Raises:
      ImportError: None is installed.
      RuntimeError: It cannot be loaded.
    """
    try:
        import jax_plugins.xla_cuda13 as plugin  # pyright: ignore[reportMissingImports]
    except ImportError:
        import jax_plugins.xla_cuda12 as plugin  # pyright: ignore[reportMissingImports]
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        plugin.initialize()
    finally:
        if before is None:
            del os.environ[_UNCHECKED]
        else:
            os.environ[_UNCHECKED] = before
