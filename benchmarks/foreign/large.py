"""Whole language models at full size, as people write them: GPT-3 175B in Flax Linen's own layers.

Nothing here is made for planning. Shapes alone are made; a parameter of these models fits no machine.
"""

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from foreign.common import Subject, ints, optax_state, optax_step


class _Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2], bool))
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(h, h, mask=mask)
        h = nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x))
        return x + nn.Dense(x.shape[-1])(nn.gelu(h))


class _Decoder(nn.Module):
    """Recomputed layers in a Python loop, in float32; the embedding also makes the logits."""

    num_layers: int
    d: int
    heads: int
    vocabulary: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.d)
        x = embed(tokens) + nn.Embed(tokens.shape[1], self.d)(jnp.arange(tokens.shape[1]))
        for _ in range(self.num_layers):
            x = nn.remat(_Block)(self.heads)(x)
        return embed.attend(nn.LayerNorm()(x))


def linen_gpt3(
    num_layers: int = 96, batch_size: int = 256, d: int = 12288, heads: int = 96, vocabulary: int = 50304
) -> Subject:
    """GPT-3 175B by `nn.Embed`, `nn.MultiHeadDotProductAttention`, `nn.Dense` and `nn.remat`; AdamW of optax."""
    model, tokens = _Decoder(num_layers, d, heads, vocabulary), ints(batch_size, 2048)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    optimizer = optax.adamw(1e-4)

    def loss(params, tokens):
        logits = model.apply(params, tokens)
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:]).mean()

    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), tokens)
