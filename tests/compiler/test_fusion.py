"""What is computed where it is read."""

import functools

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.analysis import analyse
from autoshard.trace.trace import trace


@pytest.mark.parametrize("is_parameter", [True, False])
def test_rows_are_looked_up_where_they_are_read(is_parameter):
    """The kernel that adds the rows of a product looks them up; those of a parameter may be a sum to reduce."""

    def receive(x, at, edges):
        return edges + (x if is_parameter else x @ x)[at]

    x, edges = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (256, 64)))
    graph = trace(receive, (x, jax.ShapeDtypeStruct((256,), jnp.int32), edges)).graph
    (rows,) = (o.results[0] for o in graph.operations if o.name == "gather")
    assert (rows in analyse(graph).live.stored) == is_parameter


@pytest.mark.parametrize("is_found", [True, False])
def test_what_a_gather_takes_elements_of_is_computed_there(is_found):
    """Scores of a product, in float32: the kernel that takes one of each row converts it. A product of its own reads
    what is stored.
    """

    def f(x, w, labels):
        scores = (x @ w).astype(jnp.float32)[:-1]
        found = jnp.take_along_axis(scores, labels[:, None], axis=-1) if is_found else scores @ scores.T
        return jnp.max(scores, axis=-1) - found[:, 0]

    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    graph = trace(f, (bf16(65, 128), bf16(128, 256), jax.ShapeDtypeStruct((64,), jnp.int32))).graph
    scores = next(o.results[0] for o in graph.operations if o.name == "slice")
    assert (scores in analyse(graph).live.stored) != is_found


def test_what_others_are_scattered_into_is_stored():
    """The gradient of rows that are looked up in an activation joins that of another use: it is added where that is."""

    def f(x, w, at):
        y = jnp.tanh(x @ w)
        return jnp.sum(y[at] ** 2) + jnp.sum(jnp.sin(y) ** 2)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    graph = trace(jax.grad(f), (f32(512, 128), f32(128, 256), jax.ShapeDtypeStruct((64,), jnp.int32))).graph
    (scattered,) = (o.results[0] for o in graph.operations if o.name == "scatter-add")
    live = analyse(graph).live
    assert live.root[scattered] in live.stored and graph.values[live.root[scattered]].shape == (512, 256)


def test_what_others_are_scattered_into_for_a_result_is_made_in_its_place():
    """Momentum of a table: what is left of it is never there beside the new one."""

    def f(momentum, at, rows):
        return momentum * 0.9 + jnp.zeros_like(momentum).at[at].add(rows)

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    graph = trace(f, (f32(512, 64), jax.ShapeDtypeStruct((32,), jnp.int32), f32(32, 64)), (0,)).graph
    (left,) = (o.results[0] for o in graph.operations if o.name == "mul")
    assert left not in analyse(graph).live.stored


@pytest.mark.parametrize("name", [jnp.copy, lambda y: y.reshape(128, 32)], ids=["copied", "reshaped"])
def test_what_a_product_reads_under_another_name_is_stored(name):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    graph = trace(lambda x, w: name(x * 2.0) @ w[: name(x).shape[1]], (f32(64, 64), f32(64, 64))).graph
    (doubled,) = (o.results[0] for o in graph.operations if o.name == "mul")
    assert doubled in analyse(graph).live.stored


@pytest.mark.parametrize("is_summed", [True, False])
def test_a_hyperbolic_tangent_is_stored_for_three_kernels(is_summed):
    """What the first product reads is made of it, and so is the result: two kernels. Where the product reads the
    tangents' shares of their sum, a third one sums them first.
    """

    def f(x, w):
        y = jnp.tanh(x @ w)
        total = jnp.sum(y, axis=1, keepdims=True) if is_summed else 2.0
        return ((y / total) @ w) * y

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    graph = trace(f, (square, square)).graph
    (tangents,) = (o.results[0] for o in graph.operations if o.name == "tanh")
    assert (tangents in analyse(graph).live.stored) == is_summed


def cast(x):
    return jnp.tanh(x.astype(jnp.float32))


@pytest.mark.parametrize(
    ("function", "dtype", "is_stored"),
    [
        (jnp.tanh, jnp.bfloat16, True),  # two kernels: 23 bytes to compute one again, 2 (2 + 2 + 2) = 12 to fetch it
        (jnp.tanh, jnp.float32, False),  # 2 (4 + 4 + 4) = 24
        (cast, jnp.bfloat16, True),  # 2 (4 + 2 + 2) = 16
        (jax.lax.erf, jnp.float32, True),  # 40 bytes to compute one again
        (jax.lax.erfc, jnp.float32, True),  # likewise
    ],
    ids=["narrow", "wide", "cast", "erf", "erfc"],
)
def test_what_takes_longer_to_compute_again_than_to_fetch_is_stored(function, dtype, is_stored):
    """Two kernels read it: that in front of the second product and that of the result."""

    def f(x, w):
        u = x @ w
        y = function(u)
        return ((y * u).astype(u.dtype) @ w) * y

    square = jax.ShapeDtypeStruct((64, 64), dtype)
    graph = trace(f, (square, square)).graph
    (value,) = (o.results[0] for o in graph.operations if o.name in ("tanh", "erf", "erfc"))
    assert (value in analyse(graph).live.stored) == is_stored


@pytest.mark.parametrize(("num_kernels", "is_stored"), [(2, False), (3, True)])
def test_a_chain_of_functions_takes_as_long_as_all_of_them(num_kernels, is_stored):
    """A logistic function and what is one less than an exponential, worth 5 and 10 bytes, in float32 of 2 bytes. Two
    kernels would fetch 2 (4 + 2 + 2) = 16 instead, and three 24 instead of computing it twice more, which are 30."""

    def f(x, w):
        y = jnp.expm1(jax.nn.sigmoid((x @ w).astype(jnp.float32)))
        last = (y * y).astype(x.dtype)
        for _ in range(num_kernels - 1):
            last = (last @ w) * y.astype(x.dtype)
        return last

    square = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    graph = trace(f, (square, square)).graph
    (value,) = (o.results[0] for o in graph.operations if o.name == "expm1")
    assert (value in analyse(graph).live.stored) == is_stored


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_an_activation_is_made_with_its_tangent_if_that_is_stored_else_with_its_gradient(dtype, formulated, mesh_of):
    """A layer that is computed again in the backward pass, whose activation only the product of a weight gradient
    reads. Four arrays of its size are there either way when the activation's gradient is made: what it is made of (the
    layer's input and what comes back), its result, and beside these the tangent, or the activation of the same kernel.
    """

    def step(state, x, d):
        a, b = state
        h = x @ a
        tangent = jnp.tanh(h)
        b_gradient = jnp.einsum("ni,nj->ij", h * tangent, d)
        g = (d @ b) * (h - tangent)
        return (a - jnp.einsum("ni,nj->ij", x, g), b - b_gradient), (g @ a).sum(0)

    weight, rows = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 64), (128, 64)))
    f = formulated(step, ((weight, weight), rows, rows), mesh_of(1), donate=(0,))
    graph, live = f.program.graph, f.program.analysis.live
    made = {o.results[0]: o for o in graph.operations if graph.values[o.results[0]].shape == rows.shape}
    gradient = max(o.index for o in made.values() if o.name == "mul")
    spans = {made[l.value].index: (l.start, l.stop) for l in live.ranges if l.value in made}
    _, tangent, activation, *_ = (o.index for o in made.values())
    early = activation + 1  # the product of the weight gradient that reads the activation
    if dtype == jnp.bfloat16:
        assert spans[tangent] == (tangent, gradient + 1) and spans[activation] == (activation, early + 1)
    else:
        assert tangent not in spans and spans[activation] == (gradient, gradient + 2)
    assert sum(start <= gradient < stop for start, stop in spans.values()) == 4
    assert live.delayed == ({} if dtype == jnp.bfloat16 else {early: gradient + 1})


@pytest.mark.parametrize(("num_sources", "is_stored"), [(20, False), (21, True)])
def test_what_is_made_of_many_values_is_computed_once(num_sources, is_stored):
    """As the sums of an associative scan; two readers, in one kernel each."""

    def f(*rows):
        total = functools.reduce(jnp.add, map(jnp.sin, rows))
        return (jnp.sum(total, axis=0), jnp.sum(total * total, axis=1), *rows)

    rows = [jax.ShapeDtypeStruct((64, 32), jnp.float32)] * num_sources
    graph = trace(f, rows).graph
    stored = analyse(graph).live.stored
    totals = [o.result() for o in graph.operations if o.name == "add"]
    assert (totals[-1] in stored) is is_stored and not stored & {*totals[:-1]}


def test_every_second_level_of_an_associative_scan_is_stored():
    """What one level adds up, the next one reads twice, as its odd elements and for its even ones: what that needs in
    turn would be fetched four times. So XLA stores 256 and 64 of 1,024 sums for an H100, with 16 states each, and
    neither 512 nor 128. The last ones are in the kernel that reads them."""

    def f(x, rates, reads, w):
        decay, added = jnp.exp(x[..., None] * rates), x[..., None] * reads[:, None]
        combined = lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1])
        states = jax.lax.associative_scan(combined, (decay, added))[1]
        return (states * reads[:, None]).sum(-1) @ w

    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    graph = trace(f, (f32(1024, 2048), f32(2048, 16), f32(1024, 16), f32(2048, 64))).graph
    live = analyse(graph).live
    sums = [o.results[0] for o in graph.operations if o.name == "add"]
    interleaved = sums[sums.index(next(v for v in sums if graph.values[v].shape[0] == 2)) :]
    found = {graph.values[v].shape[0] for v in interleaved if v in live.stored}
    assert {256, 64} <= found and found.isdisjoint({1024, 512, 128, 32})
