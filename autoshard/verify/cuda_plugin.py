"""XLA:GPU's compiler in a process where JAX has left it out.

Where JAX may use GPUs (`JAX_PLATFORMS` does not say otherwise), its CUDA plugin looks for cuDNN when a program first
asks for devices. Machines without a GPU have none; JAX prints a traceback then and does without the plugin, whose
compiler needs no cuDNN. There is no public way to ask again. So this file calls what JAX called, the `initialize` of
the plugin, without that check (`JAX_SKIP_CUDA_CONSTRAINTS_CHECK`).
"""

import importlib
import os

PLUGINS = "jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"
"""The modules of JAX's CUDA plugins, the newest first."""

_UNCHECKED = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def register(plugin: str) -> None:
    """Registers a CUDA plugin that JAX has left out, so that its compiler can be asked.

    Raises:
      RuntimeError: It cannot be loaded.
    """
    before = os.environ.get(_UNCHECKED)
    os.environ[_UNCHECKED] = "1"
    try:
        importlib.import_module(plugin).initialize()
    finally:
        if before is None:
            del os.environ[_UNCHECKED]
        else:
            os.environ[_UNCHECKED] = before
