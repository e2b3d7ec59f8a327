"""What the compiler joins, and what each collective then pays of latencies and launches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

from autoshard.compiler.schedule import Schedule
from autoshard.cost.collectives import COMBINED_BYTES, Joining, all_gather, all_reduce, reduce_scatter
from autoshard.planner.overlap import Terms


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(params, x):
    """Three products, two of them alike; updated by their gradients, divided by the norm of all."""
    loss = lambda p: jnp.sum(((x @ p["one"]) @ p["two"]) @ p["last"])
    grads = jax.grad(loss)(params)
    norm = sum(jnp.sum(g * g) for g in grads.values())
    return {k: p - grads[k] / norm for k, p in params.items()}


def test_weights_and_gradients_hide_behind_the_products_that_orders_leave_them(formulated, mesh_of, monkeypatch):
    """Seven products of 16 MiB each, gathered up to four products ahead: the gathers for the fifth and later have the
    fourth product before as their anchor, those before have none. Gradients of 16 MiB have 24 products, and so until
    the update; one of 64 MiB, whose sum takes 5 ms, and no product 0.5, until the last product."""
    monkeypatch.setattr("autoshard.compiler.hiding_spans.PREFETCH_DISTANCE", 4)

    def deep(params, x):
        loss = lambda ps: jnp.sum(functools.reduce(jnp.matmul, ps, x))
        return [p - 0.1 * g for p, g in zip(params, jax.grad(loss)(params), strict=True)]

    mesh = mesh_of(4)
    gpus = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20))
    for width, is_large in ((2048, False), (4096, True)):
        params, x = [f32(width, width)] * 7, f32(16, width)
        f = formulated(deep, (params, x), gpus, schedule=Schedule.LATENCY_HIDING)
        graph, overlap = f.program.graph, f.overlap
        products = [o.index for o in graph.operations if o.name == "dot_general"]
        weights = [a.value for a in graph.arguments[:7]]
        read = [next(o for o in products if w in graph.operations[o].operands) for w in weights]
        assert read[:6] == products[:6], "forward"
        starts = [overlap.window(w, o)[0] for w, o in zip(weights, read, strict=True)]
        assert starts[:6] == [0, 0, 0, 0, products[0] + 1, products[1] + 1]
        (made, *_) = [o for o in products if set(graph.operations[o].results) & overlap.gradients]
        (gradient,) = graph.operations[made].results
        after = [o for o in products if o > made]
        until = after[-1] if is_large else len(graph.operations)
        assert len(after) >= 4 and overlap.window(gradient, None) == (made + 1, until)


def test_collectives_are_joined_with_those_of_gradients_alike(formulated, mesh_of):
    params = {"one": f32(32, 32), "two": f32(32, 32), "last": f32(32, 8)}
    f = formulated(step, (params, f32(16, 32)), mesh_of(4))
    joining = f.program.analysis.combined
    assert (joining.num_reductions, joining.num_alike) == (3, {1024: 2, 256: 1})
    shares = sorted(joining.scalar_shares.values())
    assert shares == pytest.approx([256 / 2304, 1024 / 2304, 1024 / 2304]), "one latency of the norm, by bytes"


@pytest.mark.parametrize(
    ("schedule", "alike_bytes", "reduced_bytes"),
    [(Schedule.LATENCY_HIDING, 2**20, 2**22), (Schedule.LEAST_MEMORY, 30 * 2**20, 30 * 2**20)],
)
def test_where_collectives_hide_fewer_are_joined(formulated, mesh_of, schedule, alike_bytes, reduced_bytes):
    """A weight of 1 MiB, gathered with one alike: where each hides behind products of its own it pays its latencies in
    full, else 1/30 would be its share by bytes, and pays half, as one of two. Of three sums each is one of three."""
    params = {"one": f32(512, 512), "two": f32(512, 512), "last": f32(512, 8)}
    mesh = mesh_of(4)
    gpus = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20))
    f = formulated(step, (params, f32(16, 512)), gpus, schedule=schedule)
    weight = f.program.graph.arguments[1].value
    terms = f.overlap.whole_of_flow(weight, (512, 512))
    assert terms == Terms(1.0, Joining(3, reduced_bytes), Joining(2, alike_bytes))
    gathered = all_gather(mesh_of(4).axes, 2.0**20)
    (counted,) = terms.counted([gathered])
    saved_s = 0.0 if schedule is Schedule.LATENCY_HIDING else gathered.fixed_s / 2
    assert counted.time_s == pytest.approx(gathered.time_s - saved_s)


def test_sums_made_of_those_beside_them_begin_a_collective(formulated, mesh_of):
    """Adafactor's clipping: a mean square of each gradient, and one of what it is divided by. XLA walks past those of
    one parameter, then past those of the next, and joins (one), (its second, two's first) and (two's second).
    """

    def clipped(params, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["one"]) @ p["two"]))(params)
        mean_square = lambda g: jnp.sum(g * g)
        scaled = {k: g / mean_square(g) for k, g in grads.items()}
        return {k: p - scaled[k] / mean_square(scaled[k]) for k, p in params.items()}

    f = formulated(clipped, ({"one": f32(32, 32), "two": f32(32, 8)}, f32(16, 32)), mesh_of(4))
    operation = lambda g: f.program.groups[g].operations[-1]
    shares = {operation(g): share for g, share in f.program.analysis.combined.scalar_shares.items()}
    assert [shares[o] for o in sorted(shares)] == [1.0, 0.0, 1.0, 1.0], "first of one, of two; second of one, of two"


def test_norms_of_weights_are_there_from_the_beginning(formulated, mesh_of):
    """Updates in proportion to the weights, as Adafactor's and LAMB's: the norms of the weights are joined with others
    and wait for nothing, so that no weight is gathered to be spared a latency; those of gradients pay one together."""

    def proportional(params, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["one"]) @ p["two"]))(params)
        norm = lambda a: jnp.sqrt(jnp.sum(a * a))
        return {k: p - norm(p) / norm(grads[k]) * grads[k] for k, p in params.items()}

    f = formulated(proportional, ({"one": f32(32, 32), "two": f32(32, 8)}, f32(16, 32)), mesh_of(4))
    combined, weights = f.program.analysis.combined, f.program.analysis.weights
    of_weight = {g: {a.value for a in f.program.groups[g].reads} <= weights for g in combined.scalar_shares}
    assert sorted(of_weight.values()) == [False, False, True, True]
    shares = {w: sum(s for g, s in combined.scalar_shares.items() if of_weight[g] == w) for w in (False, True)}
    assert shares == pytest.approx({False: 1.0, True: 0.0}), "one latency for the gradients' norms together"


def test_statistics_of_gradients_are_joined_with_nothing(formulated, mesh_of):
    """Adafactor's sums over rows and columns are of gradients that were summed before; nothing else is."""

    def factored(params, x):
        grads = jax.grad(lambda p: jnp.sum((x @ p["one"]) @ p["two"]))(params)
        scale = lambda g: jnp.sum(g * g, axis=0) * jnp.sum(g * g, axis=1)[:, None]
        return {k: p - grads[k] / scale(grads[k]) for k, p in params.items()}

    f = formulated(factored, ({"one": f32(32, 32), "two": f32(32, 8)}, f32(16, 32)), mesh_of(4))
    names = [
        f.program.graph.operations[f.program.groups[g].operations[-1]].name
        for g in f.program.analysis.combined.statistics
    ]
    assert names == ["reduce_sum"] * 4


def normalised(y, w, scale):
    """A layer, normalised over the examples."""
    y = y @ w
    mean, mean_square = jnp.mean(y, 0), jnp.mean(y * y, 0)
    return y + jnp.tanh((y - mean) * jax.lax.rsqrt(mean_square - mean * mean + 1e-3) * scale)


def updated(layer, params, x):
    """Layers after what they were trained with."""
    loss = lambda p: jnp.sum(jnp.square(functools.reduce(lambda y, own: layer(y, *own), p, x)))
    return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))


def test_statistics_over_examples_that_do_not_wait_for_each_other_share_a_latency(formulated, mesh_of):
    """The mean and the mean square, and the sums that become of both backward: pairs, in each of two layers, which wait
    for those of the layer before. So are those that are computed again, although they wait for no others."""
    params = [(f32(32, 32), f32(32))] * 2
    f = formulated(functools.partial(updated, normalised), (params, f32(16, 32)), mesh_of(4))
    analysis = f.program.analysis
    shares = analysis.combined.awaited_shares
    assert list(shares.values()) == [1 / 2] * 8
    assert f.overlap.of_group(f.program.groups[next(iter(shares))], (32,)) == Terms(latency_share=1 / 2)
    again = formulated(functools.partial(updated, jax.checkpoint(normalised)), (params, f32(16, 32)), mesh_of(4))
    assert list(again.program.analysis.combined.awaited_shares.values()) == [1 / 2] * 12
    in_turn = lambda p, x: jnp.exp(x - jnp.mean(x, 0)) / jnp.sum(jnp.exp(x - jnp.mean(x, 0)), 0) + p
    chained = formulated(in_turn, (f32(32), f32(16, 32)), mesh_of(4))
    assert not chained.program.analysis.combined.awaited_shares, "the one is made of the other"


def test_what_is_scattered_and_gathered_alone_pays_in_full(mesh_of):
    """A gradient of 1 MiB: 1/40 of an all-reduce's latencies is less than its share of 30 MiB; alone it pays all."""
    axes, terms = mesh_of(8).axes, Terms(1.0, reductions=Joining(40), alike=Joining(1))
    size_bytes = float(2**20)
    share = size_bytes / COMBINED_BYTES
    reduced, scattered, gathered = (make(axes, size_bytes) for make in (all_reduce, reduce_scatter, all_gather))
    (counted,) = terms.counted([reduced])
    assert counted.time_s == pytest.approx(reduced.time_s - (1 - share) * reduced.fixed_s)
    for alone in ([scattered], [gathered], [scattered, reduced]):
        assert sum(c.time_s for c in terms.counted(alone)) == pytest.approx(sum(c.time_s for c in alone))
    (sliced,) = terms.counted([scattered], [reduced])
    assert sliced.time_s == pytest.approx(scattered.time_s - (1 - share) * scattered.fixed_s), "as it was planned"
    (scalar,) = Terms(latency_share=0.25).counted([reduced])
    assert scalar.time_s == pytest.approx(reduced.time_s - 0.75 * reduced.fixed_s)
    assert Terms().counted([reduced]) == (reduced,), "between activations nothing is joined"


def test_of_the_sums_on_tpus_those_hide_that_are_exchanged():
    """Scattered over these axes; whole sums, and those over other axes, count in full. Elsewhere all hide."""
    scattered, over_all = (
        dataclasses.replace(reduce_scatter([], 8.0), time_s=1.0, axes=axes) for axes in (("a",), "ab")
    )
    whole = dataclasses.replace(all_reduce([], 8.0), time_s=1.0, axes=("a",))
    times = lambda terms: [c.time_s for c in terms.counted([scattered, over_all, whole])]
    on_gpus = Terms(0.25, reductions=Joining(1), alike=Joining(1))
    on_tpus = dataclasses.replace(on_gpus, hides_on=frozenset({("a",)}))
    assert times(on_gpus) == [0.25] * 3 and times(on_tpus) == [0.25, 1.0, 1.0]
    assert times(on_tpus.whole) == [1.0] * 3


@pytest.mark.parametrize(("width", "hides"), [(1024, True), (256, False)])
def test_on_tpus_weights_hide_and_sums_of_gradients_but_not_copies_of_gradients(formulated, mesh_of, width, hides):
    """From 1 MiB on: a weight of 4 MiB or 256 KiB."""

    def trained(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)

    mesh = mesh_of(4)
    tpu = dataclasses.replace(mesh.device_type, peak_flops_per_s={"float32": 1e12, "bfloat16": 1e12})
    mesh = dataclasses.replace(mesh, device_type=tpu)
    f = formulated(trained, (f32(width, width), f32(16, width)), mesh, schedule=Schedule.LATENCY_HIDING)
    graph, overlap = f.program.graph, f.overlap
    gradients = [v for v in overlap.gradients if graph.values[v].size_bytes == 4 * width**2]
    assert overlap.is_free(graph.arguments[0].value) == hides and not any(map(overlap.is_free, gradients))
    (group,) = (
        g
        for g in f.program.groups
        if graph.operations[g.operations[0]].name == "dot_general" and overlap.is_reduced_freely(g)
    )
    assert bool(overlap.windows_of_sum(group)) == hides
