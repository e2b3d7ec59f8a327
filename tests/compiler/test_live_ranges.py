"""When values occupy memory: peaks derived by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.compiler.analysis import analyse
from autoshard.planner.decode import estimate
from autoshard.trace.trace import trace

M = 64 * 64 * 4
"""Bytes of one 64 x 64 matrix."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


SQUARE = f32(64, 64)


def chain(x, a, b):
    return (x @ a) @ b


def residual(x, a, b):
    return jnp.tanh(x @ a) @ b + x


def update(state, gradient):
    return state - 0.1 * (state @ gradient)


def total(x, w):
    return (x @ w).sum()


def twice(x, w):
    """The first product lives until the last one."""
    y = x @ w
    return y @ ((y @ w) @ w)


def many(x):
    """Pointwise values between two products are fused away, however many they are."""
    y = x @ x
    for _ in range(5):
        y = jnp.sin(y) + 1
    return y @ x


def scanned(c, xs, w):
    def body(c, x):
        c = jnp.tanh(c @ w)
        return c, c @ x

    return lax.scan(body, c, xs)


def masked(x):
    return jnp.where(jnp.tril(jnp.ones((64, 64), bool)), x @ x, 0.0) @ x


def reshaped(x, w):
    return (x @ w).reshape(-1).reshape(32, 128) @ jnp.ones((128, 2))


def bf16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def scores(x, w):
    """Exponentials of 4 bytes that two products need are made twice of scores of 2 bytes."""
    e = jnp.exp((x @ w).astype(jnp.float32))
    a = (e * 2).astype(jnp.bfloat16) @ w
    return (e * 3).astype(jnp.bfloat16) @ a


def sums(x, w):
    """The sum of two products is made in the place of the second, and the first ends."""
    y = x @ x + x @ w
    t = w @ w
    return jnp.sin(y) + t @ t


def scattered(table, at, x):
    """What a plain update adds to a table is added where it is looked up; no gradient of the table is ever there."""
    return table + jnp.zeros_like(table).at[at].add(x)


def rounds(at, x, w):
    """Execution fills the zeros of each sum when what is added to them is there."""
    y = jnp.zeros((4096, 64)).at[at].add(x)
    return jnp.zeros((4096, 64)).at[at].add(w @ y)


def pooled(x):
    """The gradient of a maximum over windows is scattered into zeros that are made with x."""
    pool = lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID")
    return jax.grad(lambda x: jnp.sum(pool(x) ** 2))(x)


PEAKS = [
    # the argument, zeros for its gradient, the maxima, and what is scattered
    (pooled, (SQUARE,), (), 2 * M + 2 * M // 4),
    # arguments, a sum of 1 MiB, and the product of 3 x 64 that is made of it or added to it
    (rounds, (jax.ShapeDtypeStruct((3,), jnp.int32), f32(3, 64), f32(3, 4096)), (), 12 + (4096 + 3 + 3) * 256 + 49152),
    # arguments; scores, e * 3, the first product and the result, or scores, the first product and e * 3
    (scores, (bf16(64, 64),) * 2, (), 2 * M // 2 + 3 * M // 2),
    # arguments; the sum, w @ w and its square
    (sums, (SQUARE,) * 2, (), 5 * M),
    # the table, where it was, and what is added to three of its rows
    (scattered, (f32(1024, 64), jax.ShapeDtypeStruct((3,), jnp.int32), f32(3, 64)), (0,), (1024 + 3) * 64 * 4),
    # arguments stay (x, a, b); both results at the end
    (chain, (SQUARE,) * 3, (), 5 * M),
    # arguments, the sum of the first product, and tanh of it; or tanh and the second product; or the latter and the sum
    (residual, (SQUARE,) * 3, (), 5 * M),
    # the new state takes over the old state's buffer: state, gradient, product
    (update, (SQUARE,) * 2, (0,), 3 * M),
    # without donation the new state is one more, while the product is still there
    (update, (SQUARE,) * 2, (), 4 * M),
    # a donated argument that nothing succeeds ends with its last use; then only w, the product and the sum are there
    (total, (SQUARE,) * 2, (0,), 3 * M),
    # x, w; y, y @ w and its product; y, that product and the result
    (twice, (SQUARE,) * 2, (), 5 * M),
    # x, the product, and the last pointwise value that the second product reads
    (many, (SQUARE,), (), 3 * M),
    # x, the product, the selection that the second product reads; the mask is made anew where it is read
    (masked, (SQUARE,), (), 3 * M),
    # c, w, 5 of xs and 5 of the stacked output; the carry; one slice of xs, tanh, and the product
    (scanned, (SQUARE, f32(5, 64, 64), SQUARE), (), (1 + 1 + 5 + 5 + 1 + 3) * M),
]


@pytest.mark.parametrize(("fn", "args", "donate", "peak_bytes"), PEAKS)
def test_peaks_by_hand(fn, args, donate, peak_bytes, formulated, mesh_of):
    f = formulated(fn, args, mesh_of(1), donate=donate)
    figures = estimate(f, [0] * len(f.problem.nodes))
    assert peak_bytes <= figures.peak_bytes <= peak_bytes + 64, "up to a few scalars"
    assert sum(m.size_bytes for m in figures.memory) == pytest.approx(figures.peak_bytes)
    assert figures.peak_bytes <= figures.reserved_bytes <= peak_bytes + 512, "what fits into results lies there"


def test_reshapes_are_other_names(formulated, mesh_of):
    """x, w, the product (read later under another name), the constant of 1 kB, and the result of 256 B."""
    f = formulated(reshaped, (SQUARE, SQUARE), mesh_of(1))
    assert estimate(f, [0] * len(f.problem.nodes)).peak_bytes == 3 * M + 32 * 2 * 4


@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: f])
def test_what_enters_a_checkpointed_function_is_stored(wrap):
    """The exponentials of a product would be computed again in each kernel that reads them. But the barrier that JAX
    puts around what a checkpointed function is computed again from keeps them.
    """

    def gradient(x, w):
        layer = wrap(lambda h: jnp.sum((jnp.sin(h) @ w) ** 2))
        return jax.grad(lambda x: layer(jnp.exp(x @ w)))(x)

    graph = trace(gradient, (SQUARE, SQUARE)).graph
    (exponentials,) = (o.results[0] for o in graph.operations if o.name == "exp")
    assert (exponentials in analyse(graph).live.stored) == (wrap is jax.checkpoint)


def test_what_one_kernel_reads_for_two_results_ends_with_it():
    """Gradients of a gated layer: the second is made with the first, before the product that the program does next."""

    def gradients(d, x, a, b):
        h, k, g = x @ a, x @ b, d @ a
        return ((g * k) @ b) @ ((g * jnp.sqrt(h) * 2) @ a)

    graph = trace(gradients, [SQUARE] * 4).graph
    *read, first, second, _ = [o for o in graph.operations if o.name == "dot_general"]
    made = {life.value: life for life in analyse(graph).live.ranges}
    assert max(made[o.results[0]].stop for o in read) <= first.index
    both = made[second.operands[0]]
    assert both.start < first.index < both.stop


def test_gradients_that_only_weight_gradients_read_are_made_together():
    """Of the branches of a first gated layer: the second is made with the first, before the product that reads that."""

    def gradients(a, b, d, h, k, x):
        of_a, of_b = x.T @ (d * k), x.T @ (d * jnp.sqrt(h) * k)
        return a - of_a, b - of_b

    graph = trace(gradients, [SQUARE] * 6, donate_argnums=(0, 1)).graph
    first, second = [o for o in graph.operations if o.name == "dot_general"]
    made = {life.value: life for life in analyse(graph).live.ranges}
    assert made[second.operands[1]].start <= made[first.operands[1]].start < first.index < made[second.operands[1]].stop


@pytest.mark.parametrize("is_read_later", [False, True])
def test_of_two_products_that_which_frees_more_is_made_first(is_read_later):
    """Of the backward pass of attention: p, 64 x 64, ends before the gradient of as many elements is made, since the
    product of 64 x 4 that needs it last frees more than that. If p is needed later, nothing is gained.
    """

    def gradients(q, k, v, d):
        p = jnp.exp(q @ k.T)
        weights, values = jnp.einsum("id,jd->ij", d, v), jnp.einsum("id,ij->dj", d, p)
        return (weights * (p if is_read_later else 2.0)) @ k, values

    graph = trace(gradients, [f32(64, 4)] * 4).graph
    _, first, second, _ = (o for o in graph.operations if o.name == "dot_general")
    (p,) = (o.results[0] for o in graph.operations if o.name == "exp")
    made = {life.value: life for life in analyse(graph).live.ranges}
    assert (made[p].stop <= first.index) != is_read_later
    assert (made[second.results[0]].start < first.index) != is_read_later


def test_a_sum_is_a_result_of_the_kernel_that_reads_the_same_behind_it():
    """The gradient `d` of scores `s` that a parameter scaled: the sum of `s * d`, and `d` scaled for the next product,
    are one kernel, so that `s`, `d` and the latter are there at once, with the weight and the rows."""

    def fn(x, y, w, scale):
        s, d = x @ w, y @ w
        return jnp.sum(s * d), (d * scale) @ w

    graph = trace(fn, (SQUARE, SQUARE, SQUARE, f32())).graph
    live = analyse(graph).live
    total = next(o for o in graph.operations if o.name == "reduce_sum")
    scaled = next(o for o in graph.operations if o.name == "mul" and o.index > total.index)
    (life,) = (life for life in live.ranges if life.value == scaled.result())
    assert life.start == total.index


def test_a_scan_has_its_slices_from_their_first_readers_on_and_stacks_what_kernels_make_at_once():
    """A body of three products: its second slice is read by the last one, and its sine is made behind the first one."""

    def f(c, xs, ys):
        def body(c, slices):
            x, y = slices
            first = c @ x
            return (first @ x) @ y, jnp.sin(first)

        return lax.scan(body, c, (xs, ys))

    graph = trace(f, (SQUARE, f32(8, 64, 64), f32(8, 64, 64))).graph
    lives = {life.value: life for life in analyse(graph).live.ranges}
    of = lambda name: [o for o in graph.operations if o.name == name]
    products, (sine,) = [o.index for o in of("dot_general")], of("sin")
    x, y = (lives[o.results[0]] for o in of("scan_slice"))
    assert (x.start, x.stop) == (products[0], products[1] + 1)
    assert (y.start, y.stop) == (products[2], products[2] + 1)
    made = lives[sine.results[0]]
    assert (made.start, made.stop) == (sine.index, sine.index + 1)
