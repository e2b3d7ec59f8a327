"""Matrix products in pieces, each beside the transfer of another (collective matmul), inside a `shard_map`.

Barriers keep the compiler from undoing it. XLA:GPU's dot-merger makes one product of several that read the same
operand, which would wait for all pieces; so each product gets its operands from a barrier of its own. A sum that is
added to what has arrived becomes part of the product before it (cuBLAS's beta), which would wait for the transfer; so
parts of sums are added at the end. And pieces are sent only when the other operand is there: two products that gather
the same operand, far apart, would else share the pieces, and keep them in between.

And each transfer is given one product to run beside, no more: it begins when the product before that is done, and has
to be through before the product behind it begins. XLA's scheduler, which works from the end, would else put two
products beside a transfer that takes a little longer than one, and has none left for the first transfers.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from autoshard.graph.equation_plan import ProductPieces
from autoshard.graph.graph import FactorRule

Product = Callable[[Sequence[jax.Array]], jax.Array]
"""A matrix product of two operands."""
_Run = Callable[[jax.Array, list[jax.Array], jax.Array | None], jax.Array]
"""Of the number of a piece, both operands of its product, and what was made of the piece before."""


def in_pieces(product: Product, operands: Sequence[jax.Array], rule: FactorRule, pieces: ProductPieces) -> jax.Array:
    """The result of a product on one device.

    Args:
      product: The product. operands: This device's shards; of the operand that is gathered, one piece.
      rule: The rule of the product, whose dimensions tell where what is cut lies. pieces: How it runs.
    """
    if pieces.slot is None:
        return _scattered(product, operands, rule, pieces)
    (factor,) = rule.operands[pieces.slot][pieces.dim]
    if (dim := _dim_of(rule.results[0], factor)) is not None:
        return _gathered(product, operands, pieces, dim)
    cut = _dim_of(rule.operands[1 - pieces.slot], factor)
    assert cut is not None, "what is not in the result is summed, and both operands have it"
    return _summed(product, operands, pieces, cut)


def _dim_of(dims: Sequence[Sequence[int]], factor: int) -> int | None:
    return next((d for d, factors in enumerate(dims) if factor in factors), None)


def _arriving(operands: Sequence[jax.Array], pieces: ProductPieces, run: _Run) -> list[jax.Array]:
    """What `run` makes of each piece of the operand that is gathered, the device's own first. While it does, the piece
    is on its way to the neighbour in front."""
    assert pieces.slot is not None
    n, own = jax.lax.axis_size(pieces.axis), jax.lax.axis_index(pieces.axis)
    operands = jax.lax.optimization_barrier(list(operands))
    piece, made = operands[pieces.slot], []
    for k in range(n):
        behind = jax.lax.ppermute(piece, pieces.axis, [(i, (i - 1) % n) for i in range(n)]) if k < n - 1 else piece
        pair = list(operands)
        pair[pieces.slot] = piece
        made.append(run((own + k) % n, pair, made[-1] if made else None))
        piece, made[-1] = jax.lax.optimization_barrier((behind, made[-1]))
    return made


def _gathered(product: Product, operands: Sequence[jax.Array], pieces: ProductPieces, dim: int) -> jax.Array:
    """Each piece of an operand gives a piece of the result, along its dimension `dim`."""
    parts = _arriving(operands, pieces, lambda _, pair, __: product(jax.lax.optimization_barrier(pair)))
    n, own = len(parts), jax.lax.axis_index(pieces.axis)
    shape, size = list(parts[0].shape), parts[0].shape[dim]
    shape[dim] = n * size
    result = jnp.zeros(shape, parts[0].dtype)
    for k, part in enumerate(parts):
        result = jax.lax.dynamic_update_slice_in_dim(result, part, (own + k) % n * size, dim)
    return result


def _summed(product: Product, operands: Sequence[jax.Array], pieces: ProductPieces, cut: int) -> jax.Array:
    """Each piece of an operand meets its part of the other, along the dimension `cut` of that; each product is added to
    those before it."""
    assert pieces.slot is not None
    other = 1 - pieces.slot

    def added(number: jax.Array, pair: list[jax.Array], before: jax.Array | None) -> jax.Array:
        pair[other] = _part(pair[other], number, cut, pieces)
        made = product(jax.lax.optimization_barrier(pair))
        return made if before is None else before + made

    return _arriving(operands, pieces, added)[-1]


def _scattered(product: Product, operands: Sequence[jax.Array], rule: FactorRule, pieces: ProductPieces) -> jax.Array:
    """Each device makes its part of the sum of every piece, and sends it to the device that keeps the piece; its own
    part last, while the one before is on its way."""
    n, own = jax.lax.axis_size(pieces.axis), jax.lax.axis_index(pieces.axis)
    (factor,) = rule.results[0][pieces.dim]
    cuts = [_dim_of(dims, factor) for dims in rule.operands]
    arrived: list[jax.Array] = []
    for k in (*range(1, n), 0):
        number = (own + k) % n
        cut = [o if d is None else _part(o, number, d, pieces) for o, d in zip(operands, cuts, strict=True)]
        if len(arrived) > 1:
            cut, arrived[-2] = jax.lax.optimization_barrier((cut, arrived[-2]))
        part = jax.lax.optimization_barrier(product(jax.lax.optimization_barrier(cut)))
        arrived.append(jax.lax.ppermute(part, pieces.axis, [(i, (i + k) % n) for i in range(n)]) if k else part)
    kind = arrived[0].dtype
    wide = jnp.promote_types(kind, jnp.float32) if jnp.issubdtype(kind, jnp.floating) else kind
    return functools.reduce(jnp.add, [part.astype(wide) for part in arrived]).astype(kind)


def _part(operand: jax.Array, number: jax.Array, dim: int, pieces: ProductPieces) -> jax.Array:
    """Part `number` of as many equal parts along `dim` as there are pieces."""
    size = operand.shape[dim] // jax.lax.axis_size(pieces.axis)
    return jax.lax.dynamic_slice_in_dim(operand, number * size, size, dim)
