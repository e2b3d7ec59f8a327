"""Laws of groups, on programs of every form, and the groupings that planning relies on."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from autoshard_models import train_step
from autoshard_models.gpt_linen import LinenGPTConfig
from autoshard_models.presets import preset
from jax import lax

from autoshard.graph.graph import Graph, OperationKind
from autoshard.graph.groups import group_operations, map_dims
from autoshard.graph.pointwise import free_values, is_pointwise
from autoshard.trace.trace import trace


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def own_transpose(x):
    y = jnp.sin(x)
    return y + y.T


def residual_layers(x, ws, mask):
    """Each layer reads the same mask, which spans only two of its three dimensions."""
    for w in ws:
        x = x + jnp.where(mask > 0, jnp.tanh(x @ w), 0.0)
    return x


def masked_attention(x):
    """A mask made of nothing, rebuilt in each of two layers' ways of reading it."""
    mask = jnp.tril(jnp.ones((8, 8), bool))
    for _ in range(2):
        x = jax.nn.softmax(jnp.where(mask, x @ jnp.swapaxes(x, 1, 2), -1e9)) @ x
    return x


def loops(x, y):
    """A scan, a while loop and a conditional, with carries that the body changes, keeps and swaps."""

    def body(carry, row):
        a, b, kept = carry
        return (b, a + row, kept), (a * kept).sum()

    (a, b, _), sums = lax.scan(body, (x[0], x[1], y[0]), x)
    a = lax.while_loop(lambda c: c[1] < 3, lambda c: (jnp.cos(c[0]) + y[0], c[1] + 1), (a, 0))[0]
    return lax.cond(sums[0] > 0, lambda a, b: a + b, lambda a, b: a.astype(float) - 1, a, b)


def adamw_update(params, gradients, state):
    updates, state = OPTIMIZER.update(gradients, state, params)
    return optax.apply_updates(params, updates), state


OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)
PARAMS = {"a": f32(8, 4), "b": f32(8, 4), "c": f32(16)}


def gpt(**options) -> Graph:
    sizes = dict(num_layers=2, embed_dim=32, num_heads=4, context_length=16)
    base = preset("tiny", **sizes)
    config = LinenGPTConfig(**{f.name: getattr(base, f.name) for f in dataclasses.fields(base)}, **options)
    functions = train_step.build(dataclasses.replace(config, remat=True), train_step.adamw())
    state = jax.eval_shape(functions.init, 0)
    return trace(functions.step, (state, train_step.batch_shapes(batch_size=4, sequence_length=16)), (0,)).graph


PROGRAMS = {
    "own_transpose": lambda: trace(own_transpose, (f32(8, 8),)).graph,
    "residual_layers": lambda: trace(residual_layers, (f32(4, 8, 8), [f32(8, 8)] * 3, f32(8, 8))).graph,
    "masked_attention": lambda: trace(jax.grad(lambda x: masked_attention(x).sum()), (f32(4, 8, 8),)).graph,
    "loops": lambda: trace(loops, (f32(5, 8), f32(2, 8))).graph,
    "loops_gradient": lambda: (
        trace(
            jax.grad(lambda x, y: lax.scan(lambda c, r: (jnp.sin(c * r), None), y[0], x)[0].sum()),
            (f32(5, 8), f32(2, 8)),
        ).graph
    ),
    "adamw": lambda: trace(adamw_update, (PARAMS, PARAMS, jax.eval_shape(OPTIMIZER.init, PARAMS))).graph,
    "random": lambda: (
        trace(lambda s: jax.random.normal(jax.random.key(s), (8, 4)) * 2, (jax.ShapeDtypeStruct((), "int32"),)).graph
    ),
    "gpt_unrolled": lambda: gpt(scan_layers=False),
    "gpt_scanned": lambda: gpt(scan_layers=True),
}


@pytest.fixture(params=PROGRAMS, scope="module")
def graph(request) -> Graph:
    return PROGRAMS[request.param]()


def group_holding(graph: Graph, name: str):
    """The groups that hold an operation of the given primitive."""
    return [g for g in group_operations(graph) if any(graph.operations[o].name == name for o in g.operations)]


def test_groups_partition_the_operations(graph):
    free = free_values(graph)
    groups = group_operations(graph)
    times = collections.Counter(o for g in groups for o in g.operations)
    for operation in graph.operations:
        is_free = bool(operation.results) and all(r is None or r in free for r in operation.results)
        assert times[operation.index] == (0 if is_free else 1)
    assert [g.index for g in groups] == list(range(len(groups)))
    firsts = [g.operations[0] for g in groups]
    assert firsts == sorted(firsts) and all(list(g.operations) == sorted(g.operations) for g in groups)


def test_only_pointwise_operations_and_partial_sums_share_a_group(graph):
    for group in group_operations(graph):
        members = [graph.operations[o] for o in group.operations]
        makers = [o for o in members if not is_pointwise(o)]
        assert {o.trips for o in members} == {group.trips}
        if len(members) > 1 and makers:  # terms of one sum: reductions of one extent, and the additions
            reduced = [tuple(f.size for f in o.rule.factors if f.reduction == "add") for o in makers]
            assert len(set(reduced)) == 1 and reduced[0]
            assert {o.name for o in members if o not in makers} <= {"add", "add_any"}
            assert len(members) == 2 * len(makers) - 1
            assert len({a.dims for a in group.writes}) == 1, "all terms are laid out alike"


def test_factors_are_those_of_the_operations(graph):
    for group in group_operations(graph):
        for index, own in zip(group.operations, group.factor_maps, strict=True):
            rule = graph.operations[index].rule
            assert len(set(own)) == len(own) == len(rule.factors), "two factors of one operation became one"
            assert [group.factors[f].size for f in own] == [f.size for f in rule.factors]


def test_every_access_is_listed_in_the_dimensions_it_has(graph):
    """What an operation reads is either written inside its group in the same dimensions, or among the group's reads."""
    free = free_values(graph)
    for group in group_operations(graph):
        writes = {a.value: a.dims for a in group.writes}
        reads = {(a.value, a.dims, o) for a in group.reads for o in a.operations}
        seen = set()
        for index, own in zip(group.operations, group.factor_maps, strict=True):
            operation = graph.operations[index]
            for value, dims in zip(operation.results, operation.rule.results, strict=True):
                assert value is None or writes[value] == map_dims(dims, own)
            for value, dims in zip(operation.operands, operation.rule.operands, strict=True):
                if value is None or value in free:
                    continue
                mapped = map_dims(dims, own)
                is_inside = writes.get(value) == mapped and operation.kind is not OperationKind.LOOP_CARRY
                assert is_inside != ((value, mapped, index) in reads)
                seen.add((value, mapped, index))
        assert reads <= seen


def test_every_value_is_defined_once(graph):
    written = collections.Counter(a.value for g in group_operations(graph) for a in g.writes)
    arguments = {a.value for a in graph.arguments}
    assert set(written.values()) <= {1}
    assert arguments.isdisjoint(written)
    for group in group_operations(graph):
        for access in group.reads:
            kind = graph.values[access.value].kind.value
            assert access.value in written or access.value in arguments or kind == "constant"


def test_free_values_depend_on_no_argument_but_scalars(graph):
    free = free_values(graph)
    for operation in graph.operations:
        if any(r in free for r in operation.results):
            assert all(o is None or o in free or graph.values[o].shape == () for o in operation.operands)
            assert not operation.name.startswith("random")


def test_a_transpose_of_its_own_value_is_a_read():
    (group,) = group_operations(PROGRAMS["own_transpose"]())
    inner = [a for a in group.reads if a.value in {w.value for w in group.writes}]
    assert len(inner) == 1
    (write,) = [w for w in group.writes if w.value == inner[0].value]
    assert write.dims == tuple(reversed(inner[0].dims)), "read in other dimensions than it is defined"


def test_a_shared_mask_does_not_weld_layers():
    graph = PROGRAMS["residual_layers"]()
    layers = group_holding(graph, "tanh")
    assert len(layers) == 3
    assert len(group_holding(graph, "dot_general")) == 3


def test_a_shared_bias_does_not_weld_layers():
    """Made once, and given a dimension of one in each layer before it meets the batch."""

    def scores(table, layers):
        bias = jnp.sin(table).T
        return [jnp.tanh(x * 2.0 + bias[None]) for x in layers]

    graph = trace(scores, (f32(8, 6), [f32(4, 6, 8)] * 3)).graph
    layers = group_holding(graph, "tanh")
    assert len(layers) == 3
    assert all(len(g.factors) == 3 for g in layers), "each has one batch"


def test_gradients_of_one_input_are_summed_before_they_are_reduced():
    """Three projections of x: dx is the sum of three products, each partial where the output features are split."""

    def loss(x, ws):
        return sum((x @ w).sum() for w in ws)

    graph = trace(jax.grad(lambda x, ws: loss(jnp.sin(x), ws)), (f32(4, 8), [f32(8, 6)] * 3)).graph
    sums = [g for g in group_operations(graph) if len(g.operations) == 5]
    assert len(sums) == 1
    names = sorted(graph.operations[o].name for o in sums[0].operations)
    assert names[:2] == ["add_any"] * 2 and names[2:] == ["dot_general"] * 3


def test_terms_with_a_dimension_of_one_are_no_hindrance():
    graph = trace(lambda x, y, v, w: x @ v + y @ w, (f32(1, 8), f32(1, 8), f32(8, 8), f32(8, 8))).graph
    assert len(group_operations(graph)) in (1, 3)


def test_a_mask_made_of_nothing_belongs_to_no_group():
    graph = PROGRAMS["masked_attention"]()
    free = free_values(graph)
    iotas = [o for o in graph.operations if o.name == "iota"]
    assert iotas and all(r in free for o in iotas for r in o.results)
    exponentials = [g for g in group_holding(graph, "exp")]
    assert len({g.index for g in exponentials}) == 2, "one for each layer"


def test_an_optimizer_update_is_one_group_for_each_parameter():
    graph = PROGRAMS["adamw"]()
    home = {a.value: g for g in group_operations(graph) for a in g.writes}
    updates = {}
    for output in graph.outputs:
        leaf = output.name.rpartition(".")[2]
        if graph.values[output.value].shape:
            updates.setdefault(leaf, set()).add(home[output.value].index)
    assert set(updates) == set(PARAMS)
    assert all(len(indices) == 1 for indices in updates.values()), "parameter and moments move together"
    assert len(set.union(*updates.values())) == len(PARAMS), "the learning rate's schedule does not join parameters"
    for leaf, (index,) in ((k, tuple(v)) for k, v in updates.items()):
        group = next(g for g in group_operations(graph) if g.index == index)
        read = {graph.values[a.value].name.rpartition(".")[2] for a in group.reads if graph.values[a.value].shape}
        assert read == {leaf}


def test_bodies_keep_their_own_groups():
    graph = PROGRAMS["loops"]()
    for group in group_operations(graph):
        around = {tuple(l.start <= o < l.stop for l in graph.loops) for o in group.operations}
        assert len(around) == 1, "an operation of a loop's body shares no group with one outside"
