"""What the compiler joins, and what each collective then pays of latencies and launches."""

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.collectives import COMBINED_BYTES, all_gather, all_reduce, reduce_scatter
from autoshard.planner.overlap import Terms


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def step(params, x):
    """Three products, two of them alike; updated by their gradients, divided by the norm of all."""
    loss = lambda p: jnp.sum(((x @ p["one"]) @ p["two"]) @ p["last"])
    grads = jax.grad(loss)(params)
    norm = sum(jnp.sum(g * g) for g in grads.values())
    return {k: p - grads[k] / norm for k, p in params.items()}


def test_collectives_are_joined_with_those_of_gradients_alike(formulated, mesh_of):
    params = {"one": f32(32, 32), "two": f32(32, 32), "last": f32(32, 8)}
    f = formulated(step, (params, f32(16, 32)), mesh_of(4))
    joining = f.program.analysis.combined
    assert (joining.num_reductions, joining.num_alike) == (3, {1024: 2, 256: 1})
    shares = sorted(joining.scalar_shares.values())
    assert shares == pytest.approx([256 / 2304, 1024 / 2304, 1024 / 2304]), "one latency of the norm, by bytes"


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


def test_what_is_scattered_and_gathered_alone_pays_in_full(mesh_of):
    """A gradient of 1 MiB: 1/40 of an all-reduce's latencies is less than its share of 30 MiB; alone it pays all."""
    axes, terms = mesh_of(8).axes, Terms(1.0, num_reductions=40, num_alike=1)
    size_bytes = float(2**20)
    share = size_bytes / COMBINED_BYTES
    reduced, scattered, gathered = (make(axes, size_bytes) for make in (all_reduce, reduce_scatter, all_gather))
    (counted,) = terms.counted([reduced])
    assert counted.time_s == pytest.approx(reduced.time_s - (1 - share) * reduced.fixed_s)
    for alone in ([scattered], [gathered], [scattered, reduced]):
        assert sum(c.time_s for c in terms.counted(alone)) == pytest.approx(sum(c.time_s for c in alone))
    (sliced,) = terms.counted([scattered], [reduced])
    assert sliced.time_s == pytest.approx(scattered.time_s - (1 - share) * scattered.fixed_s), "as it was planned"
    (scalar,) = Terms(scalar_share=0.25).counted([reduced])
    assert scalar.time_s == pytest.approx(reduced.time_s - 0.75 * reduced.fixed_s)
    assert Terms().counted([reduced]) == (reduced,), "between activations nothing is joined"
