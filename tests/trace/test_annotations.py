"""Sharding annotations of the user's program reach the graph."""

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from autoshard.trace.annotations import fixed_of_spec
from autoshard.trace.trace import trace


def mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def test_specs_are_read_in_full():
    unconstrained = PartitionSpec.UNCONSTRAINED
    assert fixed_of_spec(PartitionSpec("a", None, ("b", "c"), unconstrained), 6) == (
        ("a",),
        (),
        ("b", "c"),
        None,
        (),
        (),
    )


def test_constraints_are_results_that_are_fixed():
    here = mesh(a=2, b=4)

    def fn(x):
        y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(here, PartitionSpec("a", "b")))
        free = NamedSharding(here, PartitionSpec(PartitionSpec.UNCONSTRAINED, "b"))
        return jax.lax.with_sharding_constraint(jnp.sin(y), free)

    graph = trace(fn, (f32(8, 8),)).graph
    fixed = [o.fixed_results for o in graph.operations if o.name == "sharding_constraint"]
    assert fixed == [((("a",), ("b",)),), ((None, ("b",)),)]


def test_regions_state_their_own_layouts():
    here = mesh(a=8)

    def fn(x, y):
        region = jax.shard_map(
            lambda x, y: jax.lax.psum(x, "a") * y,
            mesh=here,
            in_specs=(PartitionSpec("a"), PartitionSpec()),
            out_specs=PartitionSpec(),
        )
        return region(x, y)

    graph = trace(fn, (f32(8, 4), f32(1, 4))).graph
    (region,) = [o for o in graph.operations if o.name == "shard_map"]
    assert region.fixed_operands == ((("a",), ()), ((), ()))
    assert region.fixed_results == (((), ()),)
    assert graph.unknown == ()


def test_abstract_arguments_may_carry_shardings():
    here = mesh(a=2, b=4)
    planned = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(here, PartitionSpec(None, "b")))
    whole = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(here, PartitionSpec()))
    placed = jax.device_put(jnp.ones((8, 8)), NamedSharding(here, PartitionSpec("a")))
    graph = trace(lambda x, y, z: x + y + z, (planned, whole, placed)).graph
    assert [a.fixed for a in graph.arguments] == [((), ("b",)), None, None]


def test_flax_boxes_name_axes():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel_init = nn.with_partitioning(nn.initializers.ones, (None, "model"))
            return nn.Dense(16, kernel_init=kernel_init)(x)

    model = Model()
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, 8)))
    graph = trace(lambda v, x: model.apply(v, x), (variables, f32(2, 8))).graph
    fixed = {a.name: a.fixed for a in graph.arguments}
    kernels = {n: f for n, f in fixed.items() if f is not None}
    assert list(kernels.values()) == [((), ("model",))]
    assert all("kernel" in n for n in kernels)


def test_logical_names_demand_nothing_without_rules():
    """As in Flax: only rules make mesh axes of them."""
    box = nn.LogicallyPartitioned(f32(8, 16), ("embed", "mlp"))
    fixed = lambda: [a.fixed for a in trace(lambda b: b.value * 2, (box,)).graph.arguments]
    assert fixed() == [None]
    with nn.logical_axis_rules((("mlp", "model"), ("embed", None))):
        assert fixed() == [((), ("model",))]


def test_nnx_variables_name_axes():
    class Model(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_metadata(nnx.initializers.ones, out_sharding=("data", None))
            self.linear = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)

    with jax.set_mesh(mesh(data=8)):  # flax shards annotated variables as it makes them
        _, state = nnx.split(nnx.eval_shape(lambda: Model(nnx.Rngs(0))))
    graph = trace(lambda s: jax.tree.map(lambda x: x * 2, s), (state,)).graph
    assert sorted(filter(None, (a.fixed for a in graph.arguments))) == [(("data",), ())]
