"""A decoder whose feed-forward layers are mixtures of experts, with capacity routing and a load-balancing loss.

Each sequence is a group of its own (Lepikhin et al. 2020, GShard, arXiv:2006.16668, section 3.2): an expert takes at
most `capacity` tokens of a sequence, in the order of the sequence, first choices first; a token beyond that passes by.
Dispatch and combination are matrix products with a one-hot tensor, so that tokens that are split by sequence and
experts that are split by number differ by an all-to-all.

Letters in einsums: b sequence, s position, e expert, c place within an expert's capacity, d width, f hidden width.
"""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import INIT_STDDEV, Attention, repeated, residual_stddev, types_of
from .losses import cross_entropy
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class MoEConfig:
    """Sizes and options of a mixture of experts.

    Attributes:
        vocab_size: number of token ids.
        context_length: longest sequence, in tokens.
        num_layers: number of decoder blocks, each with experts.
        num_heads: attention heads per block; must divide `embed_dim`.
        embed_dim: width of the residual stream.
        hidden_dim: width of the hidden layer of an expert.
        num_experts: experts per block.
        experts_per_token: experts that a token is sent to; at most `num_experts`.
        capacity_factor: places in all experts together, divided by what evenly spread tokens need.
        balance_weight: weight of the load-balancing loss beside the cross-entropy.
        dtype: type of activations and of matrix products; routing is in float32.
        param_dtype: type in which parameters are stored.
        remat: keep only each block's input for the backward pass and compute the rest of the block again.
        fused_attention: let cuDNN's kernels compute attention: on GPUs, where `dtype` has 16 bits.
    """

    vocab_size: int
    context_length: int
    num_layers: int
    num_heads: int
    embed_dim: int
    hidden_dim: int
    num_experts: int
    experts_per_token: int = 2
    capacity_factor: float = 1.25
    balance_weight: float = 0.01
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False
    fused_attention: bool = False

    def __post_init__(self) -> None:
        if self.embed_dim % self.num_heads:
            raise ValueError(
                f"`num_heads` must divide `embed_dim`; received num_heads={self.num_heads}, embed_dim={self.embed_dim}."
            )
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(
                "`experts_per_token` must lie between 1 and `num_experts`; received "
                f"experts_per_token={self.experts_per_token}, num_experts={self.num_experts}."
            )

    def capacity(self, num_tokens: int) -> int:
        """Tokens of a sequence of `num_tokens` that one expert takes."""
        return math.ceil(self.experts_per_token * num_tokens * self.capacity_factor / self.num_experts)


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        combine: float32 (batch, sequence, experts, capacity), a token's weight at the place that it has in an expert;
            zero elsewhere.
        balance_loss: float32 scalar, 1 where tokens are spread evenly.
        dropped: float32 scalar, the share of choices for which there was no place.
    """

    combine: jax.Array
    balance_loss: jax.Array
    dropped: jax.Array


def route(logits: jax.Array, experts_per_token: int, capacity: int) -> Routing:
    """Gives each token places in its likeliest experts, as long as they have places.

    The weights of a token's experts are their probabilities, divided by the sum over the chosen ones. The balance loss
    is that of Fedus et al. 2021 (Switch Transformer, arXiv:2101.03961, equation 4), for first choices.

    Args:
        logits: float32 (batch, sequence, experts).
        experts_per_token: choices of each token.
        capacity: places of each expert for each sequence.
    """
    num_experts = logits.shape[-1]
    probabilities = jax.nn.softmax(logits, axis=-1)
    remaining, choices = probabilities, []
    for _ in range(experts_per_token):
        choice = jax.nn.one_hot(jnp.argmax(remaining, axis=-1), num_experts, dtype=jnp.float32)
        choices.append(choice)
        remaining = remaining * (1 - choice)
    total = sum(jnp.sum(probabilities * choice, axis=-1, keepdims=True) for choice in choices)
    combine = jnp.zeros((*logits.shape, capacity), jnp.float32)
    taken, num_placed = jnp.zeros_like(logits[:, :1]), jnp.float32(0)
    for choice in choices:
        # Places count from 0 over the positions of a sequence, behind those that earlier choices took.
        place = jnp.cumsum(choice, axis=1) - choice + taken
        placed = choice * (place < capacity)
        taken = taken + jnp.sum(choice, axis=1, keepdims=True)
        num_placed = num_placed + jnp.sum(placed)
        weight = probabilities / total * placed
        combine = combine + weight[..., None] * jax.nn.one_hot(place.astype(jnp.int32), capacity, dtype=jnp.float32)
    share = jnp.mean(choices[0], axis=(0, 1))
    balance_loss = num_experts * jnp.sum(share * jnp.mean(probabilities, axis=(0, 1)))
    num_choices = experts_per_token * logits.shape[0] * logits.shape[1]
    return Routing(combine, balance_loss, 1 - num_placed / num_choices)


class Experts(nnx.Module):
    """A router and its experts, each two linear layers with a GELU between them; without biases."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        init, down_init = (nnx.initializers.normal(s) for s in (INIT_STDDEV, residual_stddev(config.num_layers)))
        sizes = (config.num_experts, config.embed_dim, config.hidden_dim)
        self.config = config
        self.router = nnx.Linear(
            config.embed_dim, config.num_experts, use_bias=False, kernel_init=init, rngs=rngs, dtype=jnp.float32
        )
        self.up = nnx.Param(init(rngs.params(), sizes, config.param_dtype))
        self.down = nnx.Param(down_init(rngs.params(), (sizes[0], sizes[2], sizes[1]), config.param_dtype))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, Routing]:
        config = self.config
        routing = route(self.router(x), config.experts_per_token, config.capacity(x.shape[1]))
        combine = routing.combine.astype(config.dtype)
        dispatch = (routing.combine > 0).astype(config.dtype)
        received = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        with jax.named_scope("experts"):
            hidden = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", received, self.up.astype(config.dtype)))
            answered = jnp.einsum("ebcf,efd->ebcd", hidden, self.down.astype(config.dtype))
        return jnp.einsum("bsec,ebcd->bsd", combine, answered), routing


class Block(nnx.Module):
    """One decoder block: attention and experts, each behind a layer norm and added to the residual stream."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        types, width = types_of(config), config.embed_dim
        self.attention_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.attention = Attention(
            width,
            (config.num_heads,),
            width // config.num_heads,
            output_stddev=residual_stddev(config.num_layers),
            fused=config.fused_attention,
            rngs=rngs,
            **types,
        )
        self.experts_norm = nnx.LayerNorm(width, rngs=rngs, **types)
        self.experts = Experts(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The new residual stream, the balance loss and the share of choices dropped."""
        x = x + self.attention.causal(self.attention_norm(x))
        answer, routing = self.experts(self.experts_norm(x))
        return x + answer, routing.balance_loss, routing.dropped


class MoE(nnx.Module):
    """The decoder: token and position embeddings, blocks, final norm, logits by the token embedding."""

    def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs):
        types, init = types_of(config), nnx.initializers.normal(INIT_STDDEV)
        self.config = config
        self.token_embed = nnx.Embed(config.vocab_size, config.embed_dim, embedding_init=init, rngs=rngs, **types)
        self.position_embed = nnx.Param(
            init(rngs.params(), (config.context_length, config.embed_dim), config.param_dtype)
        )
        self.blocks = repeated(lambda rngs: Block(config, rngs=rngs), config.num_layers, rngs)
        self.final_norm = nnx.LayerNorm(config.embed_dim, rngs=rngs, **types)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Logits of the token that follows each position.

        Args:
            tokens: int32 (batch, sequence), with sequence <= `context_length`.

        Returns:
            Logits (batch, sequence, vocab_size) in `config.dtype`; the balance loss and the share of choices dropped,
            float32 scalars, means over the blocks.
        """
        x = self.token_embed(tokens) + self.position_embed[: tokens.shape[1]].astype(self.config.dtype)
        run_block = nnx.remat(Block.__call__) if self.config.remat else Block.__call__
        balance_losses, dropped = [], []
        for block in self.blocks:
            x, balance_loss, share = run_block(block, x)
            balance_losses.append(balance_loss)
            dropped.append(share)
        logits = self.token_embed.attend(self.final_norm(x))
        return logits, sum(balance_losses) / len(balance_losses), sum(dropped) / len(dropped)


def objective(config: MoEConfig) -> Objective:
    """Prediction of the next token with balanced experts; the batch is `inputs` and `targets` (batch, sequence)."""

    def loss(model: MoE, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        logits, balance_loss, dropped = model(batch["inputs"])
        loss = cross_entropy(logits, batch["targets"]) + config.balance_weight * balance_loss
        return loss, {"balance_loss": balance_loss, "dropped": dropped}

    return nnx_objective(lambda rngs: MoE(config, rngs=rngs), loss)


def _m6(**sizes: Any) -> MoEConfig:
    """A model at scale: bfloat16 compute, float32 parameters, blocks recomputed in the backward pass."""
    return MoEConfig(
        vocab_size=51_200,
        context_length=1024,
        num_heads=16,
        embed_dim=1024,
        dtype=jnp.bfloat16,
        remat=True,
        **sizes,
    )


PRESETS: Mapping[str, MoEConfig] = MappingProxyType(
    {
        "tiny": MoEConfig(
            vocab_size=256,
            context_length=128,
            num_layers=2,
            num_heads=4,
            embed_dim=64,
            hidden_dim=128,
            num_experts=8,
        ),
        "10b": _m6(num_layers=10, hidden_dim=4096, num_experts=128),
        "100b": _m6(num_layers=24, hidden_dim=4096, num_experts=512),
        "1t": _m6(num_layers=24, hidden_dim=21_248, num_experts=960),
    }
)
"""Sizes by name: layers, widths and experts as in M6-T (Yang et al. 2021, arXiv:2105.15082), whose models have 10
billion, 100 billion and 1 trillion parameters. Vocabulary and context are our own: M6 also reads images. `tiny` reads
bytes, one token each."""
