"""Generation from a decoder with a cache of keys and values: a prompt at once (prefill), then token by token (decode).

The functions are pure, and the cache they return has the shapes of the one they were given, so that it may be donated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .gpt import GPT, GPTConfig
from .layers import Cache, LayerCache
from .llama import Llama, LlamaConfig


class InferenceFunctions(NamedTuple):
    """What `build_inference` returns.

    Attributes:
        empty_cache: batch size -> Cache of `context_length` positions, none of them seen.
        prefill: (parameters, tokens int32 (batch, sequence), Cache) -> (logits of the token after the last one,
            (batch, vocab_size), Cache).
        decode: (parameters, token int32 (batch,), Cache) -> (logits (batch, vocab_size), Cache).
    """

    empty_cache: Callable[[int], Cache]
    prefill: Callable[[Any, jax.Array, Cache], tuple[jax.Array, Cache]]
    decode: Callable[[Any, jax.Array, Cache], tuple[jax.Array, Cache]]


def build_inference(config: GPTConfig | LlamaConfig) -> InferenceFunctions:
    """The functions that generate text with the parameters that a training step makes.

    Args:
        config: of the NNX GPT or of Llama.
    """
    make = Llama if isinstance(config, LlamaConfig) else GPT
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(params=0))))

    def empty_cache(batch_size: int) -> Cache:
        shape = (batch_size, config.context_length, config.num_kv_heads, config.head_dim)
        empty = lambda: jnp.zeros(shape, config.dtype)
        return Cache(tuple(LayerCache(empty(), empty()) for _ in range(config.num_layers)), jnp.zeros((), jnp.int32))

    def prefill(params: Any, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        logits, cache = nnx.merge(graphdef, params).extend(tokens, cache)
        return logits[:, -1], cache

    def decode(params: Any, token: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return prefill(params, token[:, None], cache)

    return InferenceFunctions(empty_cache, prefill, decode)
