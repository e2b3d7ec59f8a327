"""Functions of every form run as planned: their interface, loops, annotations and state."""

import functools
import warnings

import flax.linen as nn
import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard.errors import ConfigError, LayoutError, MeshError

MESH = {"a": 2, "b": 4}
P = PartitionSpec


def array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def numbers(x) -> np.ndarray:
    """The values of an array; those of the bits of a key."""
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_same(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=2e-4, atol=2e-5)
        else:
            np.testing.assert_array_equal(numbers(x), numbers(y))


def carries_of_all_kinds(x, key):
    """Floats that change places, a counter, a flag, a key, an array that passes through, one that is never used."""

    def body(carry, row):
        a, b, count, flag, key, kept, unused = carry
        key, sub = jax.random.split(key)
        a = jnp.tanh(a * kept + row) + jax.random.normal(sub, a.shape)
        return (b, a, count + 1, flag ^ (count > 1), key, kept, unused * 2), (a.sum(0), count)

    start = (x[0], x[1], 0, False, key, x[2], x[3])
    (a, b, count, flag, key, kept, _), (sums, counts) = lax.scan(body, start, x)
    return a, b, count, flag, key, kept, sums, counts


def nested_loops(x, w):
    def inner(n, c):
        return jnp.sin(c @ w) + n

    def body(c):
        return lax.fori_loop(0, 2, inner, c[0]), c[1] * 2, c[2] + c[0].mean()

    return lax.while_loop(lambda c: (c[1] < 8) & (c[2] < 100), body, (x, 1, 0.0))


def reverse_scan(x, w):
    return lax.scan(lambda c, row: (c @ w + row, c.T), x[0], x, reverse=True, unroll=2)


def loop_gradient(w, x):
    return jax.grad(
        lambda w: (lax.scan(jax.checkpoint(lambda c, row: (jnp.tanh(c @ w + row), c)), x[0], x)[0] ** 2).sum()
    )(w)


def branches(x, w, k):
    def first(x, w):
        h = jnp.tanh(x @ w)
        return h, h @ w, x

    def second(x, w):
        h = x.T @ w
        return h, h.T @ w, 2 * x

    _, b, c = lax.switch(k, (first, second, lambda x, w: (x, x, x)), x, w)
    return b, c


def tied(embedding, ids):
    h = jax.nn.relu(embedding[ids])
    return jax.nn.log_softmax(h @ embedding.T)[:, 0].sum()


def update(state, x):
    loss, gradient = jax.value_and_grad(lambda w: ((x @ w) ** 2).mean())(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "count": state["count"] + 1}, loss


def returns_anything(x, y, unused):
    z = x * 2
    return x, z, {"again": z, "literal": 3.0, "constant": jnp.arange(8), "list": [y, None, z]}, np.float32(2)


def dropout(x, key, raw, keys):
    mask = jax.random.bernoulli(key, 0.5, x.shape)
    noise = jax.vmap(lambda k: jax.random.normal(k, (8,)))(keys)
    return jnp.where(mask, x, 0) + noise, jax.random.uniform(jax.random.wrap_key_data(raw)), jax.random.split(key, 4)


def integers(ids, mask, scale):
    return (ids * scale) % 7, mask | (ids > 3), jnp.bincount(ids.reshape(-1), length=16), ids.astype(jnp.bfloat16)


def with_callback(x):
    return jax.pure_callback(lambda a: np.asarray(a) * 2, jax.ShapeDtypeStruct((16, 8), jnp.float32), jnp.sin(x)) + 1


def by_shards(kernel, x):
    """Grouped convolutions in a checkpointed loop with their gradients, transforms, and the largest elements."""

    def loss(kernel):
        @jax.checkpoint
        def layer(h, _):
            h = lax.conv_general_dilated(h, kernel, (1,), "SAME", feature_group_count=4)
            return jnp.fft.irfft(jnp.fft.rfft(h) * jnp.fft.rfft(jnp.hanning(8))), None

        return lax.top_k(lax.scan(layer, x, None, length=2)[0], 3)[0].sum()

    return jax.value_and_grad(loss)(kernel)


def solves(a, b):
    """Batched linear systems and their gradient, which solves the transposed ones."""
    return jax.value_and_grad(lambda a: (jnp.linalg.solve(a + 4 * jnp.eye(8), b) ** 2).sum())(a)


def reductions_of_our_own(x):
    """Programs that combine two elements have as many inputs and outputs as the reductions that run them."""
    both = lambda a, b: (a[0] + b[0], jnp.maximum(a[1], b[1]))
    start, window = (np.float32(0), np.float32(-9)), (1, 4)
    of_windows = lax.reduce_window((x, x), start, both, window, window, "VALID")
    return lax.reduce(x, np.float32(1), lax.mul, (0,)), lax.reduce((x, x), start, both, (1,)), of_windows


KEY = jax.random.key(3)
FUNCTIONS = {
    "carries": (carries_of_all_kinds, (array(8, 8, 4), KEY)),
    "nested_loops": (nested_loops, (array(8, 8), array(8, 8, seed=1))),
    "reverse_scan": (reverse_scan, (array(4, 8, 8), array(8, 8, seed=1))),
    "loop_gradient": (loop_gradient, (array(8, 8), array(4, 8, 8, seed=1))),
    "branches": (branches, (array(8, 8), array(8, 8, seed=1), 1)),
    "tied": (jax.grad(tied), (array(16, 8), jnp.arange(8) % 5)),
    "returns_anything": (returns_anything, (array(8, 8), array(4), array(2))),
    "dropout": (dropout, (array(8, 8), KEY, jax.random.key_data(KEY), jax.random.split(KEY, 8))),
    "integers": (integers, (jnp.arange(64).reshape(8, 8) % 16, jnp.ones((8, 8), bool), 3)),
    "by_shards": (by_shards, (array(16, 4, 3), array(8, 16, 8, seed=1))),
    "reductions_of_our_own": (reductions_of_our_own, (array(8, 8),)),
    "solves": (solves, (array(8, 8, 8), array(8, 8, 4, seed=1))),
    "with_callback": (with_callback, (array(16, 8),)),
    "python_scalars": (lambda x, s, n: x * s + n, (array(8, 8), 2.5, 3)),
    "numpy": (lambda x, y: x @ y, (np.ones((8, 8), np.float32), np.ones((8, 4), np.float32))),
    "identity": (lambda x: {"x": x, "none": None}, (array(8, 8),)),
    "scalars_only": (lambda x: x + 1, (jnp.float32(1),)),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_runs_as_unplanned(name, seed, random_plan):
    fn, args = FUNCTIONS[name]
    plan = random_plan(fn, args, MESH, seed)
    assert_same(plan.jit(fn)(*args), jax.jit(fn)(*args))


def test_donated_state_is_advanced_in_place(random_plan):
    """The buffers of a donated state are gone after the call, and the new state fits the next call as it is."""
    state, x = {"w": array(16, 8), "count": jnp.int32(0)}, array(8, 16, seed=1)
    expected, _ = update(*[update(state, x)[0], x])
    plan = random_plan(update, (state, x), MESH, 5, (0,))
    step = plan.jit(update)
    first = plan.init(lambda: jax.tree.map(jnp.copy, state))
    second, _ = step(first, x)
    assert first["w"].is_deleted() and not x.is_deleted()
    assert second["w"].sharding == step.in_shardings((second, x))[0]["w"]
    assert_same(step(second, x)[0], expected)


def test_arrays_on_one_device_are_cut_without_a_program(random_plan):
    """JAX would compile one for each shape and layout. The arrays stay as they were, though the state is donated."""
    state, x = {"w": array(16, 8), "count": jnp.int32(0)}, array(8, 16, seed=1)
    expected, before = jax.jit(update)(state, x), np.array(state["w"])
    step = random_plan(update, (state, x), MESH, 5, (0,)).jit(update)
    assert not step.in_shardings((state, x))[0]["w"].is_fully_replicated
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        found = step(state, x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compiled) == 1
    assert_same(found, expected)
    np.testing.assert_array_equal(state["w"], before)


def averaged_update(w, average, x):
    w = w - 0.1 * jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w, 0.5 * average + 0.5 * w


@pytest.mark.parametrize("donated", [(0, 1), (0,), (1,), ()])
@pytest.mark.parametrize("is_placed", [False, True])
def test_an_average_may_begin_as_the_weights_themselves(donated, is_placed, random_plan):
    """XLA would end the process where a buffer that it may reuse comes twice."""
    w, x = array(16, 16), array(8, 16, seed=1)
    first = jax.jit(averaged_update)(w, w, x)
    expected = jax.jit(averaged_update)(*first, x)
    step = random_plan(averaged_update, (w, w, x), MESH, 2, donated).jit(averaged_update)
    given = jax.device_put(w, step.in_shardings((w, w, x))[0]) if is_placed else w
    assert_same(step(*step(given, given, x), x), expected)


def test_numbers_that_were_weak_when_planned_may_be_arrays(random_plan):
    """A state made of Python numbers comes back from a file as arrays, which promote otherwise."""
    fn = lambda state, x: {"scale": state["scale"] * 0.5, "x": x * state["scale"]}
    x = jnp.ones((8, 8), jnp.bfloat16)
    plan = random_plan(fn, ({"scale": 2.0}, x), MESH, 0)
    for scale in (2.0, np.float32(2), jnp.float32(2)):
        assert_same(plan.jit(fn)({"scale": scale}, x), jax.jit(fn)({"scale": 2.0}, x))


def test_static_arguments_are_bound_beforehand(random_plan):
    fn = jax.jit(lambda x, n: jnp.tile(x, n), static_argnums=1)
    bound = functools.partial(lambda n, x: fn(x, n), 3)
    plan = random_plan(bound, (array(8),), MESH, 0)
    assert_same(plan.jit(bound)(array(8)), jnp.tile(array(8), 3))


def test_debugging_prints_are_kept(random_plan):
    seen = []

    def fn(x):
        jax.debug.callback(lambda v: seen.append(float(v)), x.sum())
        return x * 2

    x = jnp.ones((8, 8))
    random_plan(fn, (x,), MESH, 0).jit(fn)(x).block_until_ready()
    jax.effects_barrier()
    assert seen and set(seen) == {64.0}


def test_lowering_and_compiling(random_plan):
    fn = lambda x, w: jnp.tanh(x @ w)
    x, w = array(16, 8), array(8, 8, seed=1)
    plan = random_plan(fn, (x, w), MESH, 3)
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, w)]
    planned = plan.jit(fn)
    program = planned.lower(*shapes).compile()
    placed = [jax.device_put(v, s) for v, s in zip((x, w), planned.in_shardings((x, w)), strict=True)]
    assert_same(program(*placed), fn(x, w))
    assert program.output_shardings.spec == plan.out_specs
    assert_same(planned(x, w=w), fn(x, w))
    with pytest.raises(ConfigError, match="`v` is no argument of `<lambda>`, which takes `x`, `w`"):
        planned(x, v=w)


def test_init_makes_the_state_sharded(random_plan):
    init = lambda seed: {"w": jax.random.normal(jax.random.key(seed), (16, 8)), "count": jnp.int32(0)}
    plan = random_plan(update, (jax.eval_shape(init, 0), array(8, 16)), MESH, 5, (0,))
    state = plan.init(init, 7)
    assert_same(state, init(7))
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(plan.in_specs[0]), strict=True):
        assert leaf.sharding.is_equivalent_to(NamedSharding(plan.mesh(), spec), leaf.ndim)
    with pytest.raises(autoshard.errors.PlanMismatchError, match="leaf 1"):
        plan.init(lambda: {"w": jnp.ones((16, 9)), "count": jnp.int32(0)})


def test_init_counts_arguments_without_leaves(random_plan):
    plan = random_plan(lambda x, nothing, y: (x * 2, y + 1), (array(8, 8), None, array(4)), MESH, 0)
    assert_same(plan.init(lambda: jnp.ones(4), argument=2), jnp.ones(4))
    assert_same(plan.init(lambda: jnp.ones(4), argument=-1), jnp.ones(4))
    with pytest.raises(autoshard.errors.PlanMismatchError, match="argument=3"):
        plan.init(lambda: jnp.ones(4), argument=3)


def test_planned_functions_can_be_transformed(random_plan):
    fn = lambda x, w: jnp.tanh(x @ w)
    x, w = array(8, 8), array(8, 8, seed=1)
    planned = random_plan(fn, (x, w), MESH, 4).jit(fn)
    assert_same(jax.jit(lambda x, w: planned(x, w) + 1)(x, w), fn(x, w) + 1)
    loss = lambda f: lambda w: (f(x, w) ** 2).sum()
    assert_same(jax.grad(loss(planned))(w), jax.grad(loss(fn))(w))


def test_devices_are_taken_in_mesh_order(random_plan):
    fn = lambda x: x * 2
    plan = random_plan(fn, (array(8, 8),), MESH, 1)
    backwards = jax.devices()[::-1]
    assert plan.jit(fn, devices=backwards)(array(8, 8)).sharding.mesh.devices.reshape(-1).tolist() == backwards
    with pytest.raises(MeshError, match="8 devices \\(a=2, b=4\\), but 4 are given"):
        plan.jit(fn, devices=backwards[:4])


def user_mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_constraints_are_honoured(seed, random_plan):
    here = user_mesh(**MESH)

    def fn(x):
        y = lax.with_sharding_constraint(jnp.sin(x[:8]), NamedSharding(here, P("b", "a")))
        return y, y.T @ y

    x = array(16, 8)
    plan = random_plan(fn, (x,), MESH, seed)
    found = plan.jit(fn)(x)
    assert_same(found, fn(x))
    assert plan.out_specs[0] == P("b", "a")
    number = plan.equations.index(next(e for e in plan.equations if e.startswith("sharding_constraint")))
    assert dict(dict(plan.shardings)[number].results)[0] == (("b",), ("a",))


def test_partly_open_constraints_fix_the_rest(random_plan):
    here = user_mesh(**MESH)
    fn = lambda x: lax.with_sharding_constraint(jnp.sin(x), NamedSharding(here, P(P.UNCONSTRAINED, "b"))) * 2
    specs = {random_plan(fn, (array(8, 8),), MESH, seed).shardings for seed in range(8)}
    x = array(8, 8)
    plan = random_plan(fn, (x,), MESH, 4)
    assert len(specs) > 1
    assert_same(plan.jit(fn)(x), jnp.sin(x) * 2)


def test_annotated_arguments_are_honoured(cluster):
    sharding = NamedSharding(user_mesh(**MESH), P(None, "a"))
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=sharding)
    fn = lambda x, w: x @ w
    plan = autoshard.plan(fn, jax.ShapeDtypeStruct((64, 8), jnp.float32), w, cluster=cluster, mesh=MESH)
    assert plan.in_specs[1] == P(None, "a")
    x, w = array(64, 8), array(8, 8, seed=1)
    assert_same(plan.jit(fn)(x, w), x @ w)


def test_partitioning_metadata_is_honoured(cluster):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_partitioning(nn.initializers.lecun_normal(), ("b", None))
            return nn.Dense(16, kernel_init=init)(x)

    model, x = Model(), array(8, 8)
    variables = model.init(jax.random.key(0), x)
    plan = autoshard.plan(model.apply, variables, x, cluster=cluster, mesh=MESH)
    kernel = plan.in_specs[0]["params"]["Dense_0"]["kernel"]
    assert jax.tree.leaves(kernel) == [P("b")]
    assert_same(plan.jit(model.apply)(variables, x), model.apply(variables, x))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_regions_keep_their_own_shardings(seed, random_plan):
    """A manual region between planned operations, with a gradient through it, on the plan's own axes."""
    here = user_mesh(**MESH)

    def region(x, w):
        return lax.psum(x @ w, "b")

    manual = jax.shard_map(region, mesh=here, in_specs=(P("a", "b"), P("b", None)), out_specs=P("a", None))

    def fn(x, w):
        return jax.value_and_grad(lambda w: (manual(jnp.sin(x), w) ** 2).sum())(w)

    x, w = array(8, 8), array(8, 4, seed=1)
    plan = random_plan(fn, (x, w), MESH, seed)
    expected = jax.value_and_grad(lambda w: ((jnp.sin(x) @ w) ** 2).sum())(w)
    assert_same(plan.jit(fn)(x, w), expected)


def test_a_region_on_part_of_the_axes(random_plan):
    here = user_mesh(**MESH)
    manual = jax.shard_map(
        lambda x: lax.psum(x, "a"), mesh=here, in_specs=P("a"), out_specs=P(), axis_names=frozenset({"a"})
    )
    fn = lambda x: manual(jnp.cos(x)) * 2
    x = array(8, 8)
    plan = random_plan(fn, (x,), MESH, 2)
    assert_same(plan.jit(fn)(x), jnp.cos(x).reshape(2, 4, 8).sum(0) * 2)


def test_a_region_that_reads_one_array_twice(random_plan):
    here = user_mesh(**MESH)
    manual = jax.shard_map(
        lambda x, y: lax.all_gather(x, "a", tiled=True) * lax.all_gather(y, "b", tiled=True),
        mesh=here,
        in_specs=(P("a"), P("b")),
        out_specs=P(),
        check_vma=False,
    )
    fn = lambda x: manual(jnp.cos(x), jnp.cos(x)) + manual(x, x)
    x = array(8, 8)
    assert_same(random_plan(fn, (x,), MESH, 2).jit(fn)(x), jnp.cos(x) ** 2 + x**2)


def test_a_region_on_another_mesh_is_refused(random_plan):
    """A region's body is traced for its mesh; the plan's must be the same, not only have the same names."""
    manual = jax.shard_map(lambda x: 2 * x, mesh=user_mesh(**MESH), in_specs=P("a"), out_specs=P("a"))
    fn = lambda x: manual(jnp.cos(x))
    plan = random_plan(fn, (array(8, 8),), {"b": 4, "a": 2}, 0)
    with pytest.raises(MeshError, match="region at .*test_functions.py.*{'a': 2, 'b': 4}, the plan {'b': 4, 'a': 2}"):
        plan.jit(fn)(array(8, 8))


def test_annotations_with_other_axes_are_refused(random_plan):
    here = user_mesh(x=8)
    fn = lambda x: lax.with_sharding_constraint(x * 2, NamedSharding(here, P("x"))) + 1
    with pytest.raises(LayoutError, match="the mesh lacks axis"):
        random_plan(fn, (array(8, 8),), MESH, 0)


def test_functions_of_nothing(random_plan):
    fn = lambda: jnp.arange(8) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same(random_plan(fn, (), MESH, 0).jit(fn)(), jnp.arange(8) * 2)
