"""Lets functions with cuDNN's attention be traced where there is no cuDNN, such as on a laptop.

While `jax.nn.dot_product_attention(..., implementation="cudnn")` is traced, JAX asks which cuDNN is installed and what
the GPU of this machine can do, and refuses where there is none, although neither enters the traced program. It has no
public way to say that the program is for another machine. So both questions, which are private to JAX, are answered
here as an up-to-date machine with a Hopper GPU would; one that runs the program asks again.
"""

import contextlib
from collections.abc import Iterator

from jax._src.cudnn import fused_attention_stablehlo as fused_attention

_VERSION = 91_100
"""Of cuDNN, which is assumed: 9.11, the newest that JAX asks for (0.10 to 0.12)."""


@contextlib.contextmanager
def assume_cudnn() -> Iterator[None]:
    """While a function is traced, JAX takes cuDNN to be there; nothing changes where it is. Not for several threads.

    Planning does this by itself. Before it, a state is often made by shape, which runs a Linen model once:

        with autoshard.assume_cudnn():
            params = jax.eval_shape(model.init, key, batch)
    """
    try:
        fused_attention.check_cudnn_version()
    except RuntimeError:
        pass
    else:
        yield
        return
    asked = fused_attention.check_cudnn_version, fused_attention.check_compute_capability
    fused_attention.check_cudnn_version = lambda: _VERSION
    fused_attention.check_compute_capability = lambda capability: True
    try:
        yield
    finally:
        fused_attention.check_cudnn_version, fused_attention.check_compute_capability = asked
