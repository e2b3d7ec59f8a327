"""Named GPT sizes, from a byte-level toy to GPT-3 175B.

Sizes are GPT-3's (Brown et al. 2020, arXiv:2005.14165, table 2.1) except `2.6b` and `39b`, which are Alpa's (Zheng et
al. 2022, arXiv:2201.12023, and its benchmark suite). Two of the former differ from print, whose numbers do not multiply
out: the 1.3B model's width of 2,048 makes 16 heads of 128 features, not 24, and the 13B model's 40 heads of 128
features make a width of 5,120, not 5,140.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp

from .gpt import GPTConfig

PADDED_VOCAB_SIZE = 51_200
"""GPT-2's 50,257 byte-pair tokens, padded to the next multiple of 1,024.

50,257 has no divisor between 29 and 1,733, so that no usual mesh could split the embedding and the logits; 51,200 =
2^11 x 25 splits evenly up to 2,048 ways. Megatron-LM and Alpa use the same number, which keeps results comparable. The
added rows are never a target; they cost 0.4 % of a 175B model's parameters or less.
"""


def _published(num_layers: int, embed_dim: int, num_heads: int, context_length: int = 2048) -> GPTConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return GPTConfig(
        vocab_size=PADDED_VOCAB_SIZE,
        context_length=context_length,
        num_layers=num_layers,
        num_heads=num_heads,
        embed_dim=embed_dim,
        dtype=jnp.bfloat16,
        param_dtype=jnp.float32,
        remat=True,
    )


PRESETS: Mapping[str, GPTConfig] = MappingProxyType(
    {
        "tiny": GPTConfig(vocab_size=256, context_length=128, num_layers=4, num_heads=8, embed_dim=128),
        "125m": _published(num_layers=12, embed_dim=768, num_heads=12),
        "350m": _published(num_layers=24, embed_dim=1024, num_heads=16),
        "1.3b": _published(num_layers=24, embed_dim=2048, num_heads=16),
        "2.6b": _published(num_layers=32, embed_dim=2560, num_heads=32, context_length=1024),
        "6.7b": _published(num_layers=32, embed_dim=4096, num_heads=32),
        "13b": _published(num_layers=40, embed_dim=5120, num_heads=40),
        "39b": _published(num_layers=48, embed_dim=8192, num_heads=64, context_length=1024),
        "175b": _published(num_layers=96, embed_dim=12288, num_heads=96),
    }
)
"""Every preset by its name. `tiny` reads bytes, one token each."""


def preset(name: str, **overrides: Any) -> GPTConfig:
    """The preset called `name`, with fields of `GPTConfig` replaced by `overrides`.

    Raises:
        KeyError: no preset has that name; the message lists those that exist.
    """
    if name not in PRESETS:
        raise KeyError(f"no preset is called {name!r}; choose one of {', '.join(PRESETS)}.")
    return dataclasses.replace(PRESETS[name], **overrides)
