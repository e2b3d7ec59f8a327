"""What a trace records of a program: its interface, its loops, and everything that its result depends on."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.errors import TraceError
from autoshard.graph.graph import OperationKind, ValueKind
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import trace
from autoshard.trace.walk import EquationKind, kind_of


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def names(graph) -> list[str]:
    return [o.name for o in graph.operations]


def operations(graph, name: str):
    return [o for o in graph.operations if o.name == name]


def test_arguments_are_named_by_parameter_and_path():
    def step(state, batch, *rest):
        return state

    graph = trace(
        step, ({"w": {"kernel": f32(2, 3)}, "n": [f32(), f32(4)]}, f32(5), f32(6), None, f32(7)), (0, -1)
    ).graph
    assert [a.name for a in graph.arguments] == ["state.n.0", "state.n.1", "state.w.kernel", "batch", "2", "4"]
    assert [a.position for a in graph.arguments] == [0, 0, 0, 1, 2, 4]
    assert [a.donated for a in graph.arguments] == [True, True, True, False, False, True]
    assert all(graph.values[a.value].kind is ValueKind.ARGUMENT for a in graph.arguments)


def test_shapes_and_types_are_recorded():
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 3))
    graph = trace(
        lambda *a: a, (jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), jax.ShapeDtypeStruct((), jnp.int8), key)
    ).graph
    found = [(v.shape, v.dtype, v.size_bytes) for v in graph.values]
    assert found == [((2, 3), "bfloat16", 12), ((), "int8", 1), ((3,), "key<fry>", 24)]


def test_the_next_state_succeeds_the_state():
    def step(state, batch):
        new = {"a": state["a"] + batch.sum(), "b": state["b"] * 2}
        return new, {"loss": batch.sum(), "grad": state["a"] * 3}

    graph = trace(step, ({"a": f32(4), "b": f32(4, 4)}, f32(8))).graph
    assert {o.name: o.successor_of for o in graph.outputs} == {"0.a": 0, "0.b": 1, "1.grad": None, "1.loss": None}


def test_a_state_that_is_the_whole_result_succeeds_itself():
    graph = trace(lambda x, y: x + y, (f32(4), f32(3, 1))).graph
    assert [o.successor_of for o in graph.outputs] == [None]
    graph = trace(lambda x: x + 1, (f32(4),)).graph
    assert [o.successor_of for o in graph.outputs] == [0]


def test_scalars_alone_prove_nothing():
    graph = trace(lambda step, x: (step + 1, (x * x).sum()), (f32(), f32(4))).graph
    assert [o.successor_of for o in graph.outputs] == [None, None]


def test_what_no_output_needs_is_dropped():
    def fn(x, y):
        _ = jnp.cos(x) @ y
        return jnp.sin(x), 3.0, y

    graph = trace(fn, (f32(4, 4), f32(4, 4))).graph
    assert names(graph) == ["sin"]
    assert [o.value is None for o in graph.outputs] == [False, True, False]
    assert graph.outputs[2].value == graph.arguments[1].value


def test_calls_are_inlined():
    @jax.jit
    def inner(x):
        return jax.checkpoint(jnp.sin)(x)

    graph = trace(jax.grad(lambda x: inner(x).sum()), (f32(4),)).graph
    assert {o.kind for o in graph.operations} == {OperationKind.EQUATION}
    assert "cos" in names(graph)
    assert {o.equation for o in graph.operations} <= set(range(len(graph.equations)))


def test_equations_are_numbered_depth_first():
    graph = trace(lambda x: jax.jit(lambda x: jnp.sin(jax.jit(jnp.cos)(x)))(x) + 1, (f32(4),)).graph
    assert [(o.name, o.equation) for o in graph.operations] == [("cos", 2), ("sin", 3), ("add", 4)]
    assert len(graph.equations) == 5


def test_scan():
    def fn(c, xs, w):
        def body(c, x):
            inner = lax.scan(lambda d, _: (jnp.sin(d), None), c, None, length=3)[0]
            return inner @ w, (c * x).sum()

        return lax.scan(body, c, xs)

    graph = trace(fn, (f32(4, 4), f32(5, 4, 4), f32(4, 4))).graph
    inner, outer = graph.loops
    assert (outer.trips, inner.trips) == (5, 3)
    assert (
        outer.start == 0 and outer.stop == len(graph.operations) and outer.start < inner.start < inner.stop < outer.stop
    )
    trips = {o.name: o.trips for o in graph.operations}
    assert (trips["sin"], trips["dot_general"], trips["scan_stack"]) == (15, 5, 5)
    carry = next(o for o in operations(graph, "loop_carry") if o.index < inner.start)
    assert carry.operands == (graph.arguments[0].value, operations(graph, "dot_general")[0].results[0])
    assert graph.outputs[0].value == carry.results[1]
    (piece,) = operations(graph, "scan_slice")
    assert piece.rule.operands[0] == ((), *piece.rule.results[0]), "the scanned dimension stays whole"


def test_while_loops_run_as_often_as_told():
    def fn(x):
        return lax.while_loop(lambda c: c[1].sum() < 10, lambda c: (c[0] @ c[0], c[1] + 1), (x, x[0]))[0]

    graph = trace(fn, (f32(4, 4),), options=TraceOptions(while_trips=7.0)).graph
    assert operations(graph, "dot_general")[0].trips == 7
    assert "reduce_sum" in names(graph), "the condition is computed, though no output holds it"
    assert len(operations(graph, "loop_carry")) == 2


def test_what_a_choice_depends_on_is_kept():
    def fn(x, y, unused):
        return lax.cond((x @ x).sum() > 0, jnp.sin, jnp.cos, y)

    graph = trace(fn, (f32(4, 4), f32(4), f32(3))).graph
    assert {"dot_general", "reduce_sum"} <= set(names(graph))
    (join,) = operations(graph, "branch_join")
    assert join.operands == (operations(graph, "cos")[0].results[0], operations(graph, "sin")[0].results[0])
    assert operations(graph, "sin")[0].trips == 0.5

    dead = trace(lambda x, y, z: (fn(x, y, z), y)[1], (f32(4, 4), f32(4), f32(3))).graph
    assert names(dead) == [], "a choice that nobody asks for is not made"


def test_the_users_line_is_recorded():
    graph = trace(lambda x: jax.nn.softmax(x), (f32(4),)).graph
    assert all("test_trace.py" in o.source and "<lambda>" in o.source for o in graph.operations)


def test_unknown_primitives_are_listed_once_for_each_line():
    mystery = jax.extend.core.Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)

    def fn(x):
        y = mystery.bind(x)
        return y + mystery.bind(jnp.outer(y, y))

    graph = trace(fn, (f32(4),)).graph
    assert len(graph.unknown) == 2
    assert all(u.startswith("mystery at ") and "test_trace.py" in u for u in graph.unknown)


@pytest.mark.parametrize("position", [2, -3])
def test_donated_positions_must_exist(position):
    with pytest.raises(TraceError, match=f"2 positional arguments, but got {position}"):
        trace(lambda x, y: x + y, (f32(2), f32(2)), (position,))


def test_errors_of_the_user_come_through():
    with pytest.raises(TypeError, match="dot_general"):
        trace(lambda x: x @ x, (f32(2, 3),))


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (jnp.sin, EquationKind.LEAF),
        (lambda x: jax.jit(jnp.sin)(x), EquationKind.CALL),
        (lambda x: jax.checkpoint(jnp.sin)(x), EquationKind.CALL),
        (lambda x: jax.nn.silu(x), EquationKind.CALL),
        (lambda x: lax.fori_loop(0, 3, lambda i, c: c + 1, x), EquationKind.SCAN),
        (lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: c + 1, x), EquationKind.WHILE),
        (lambda x: lax.cond(True, jnp.sin, jnp.cos, x), EquationKind.COND),
    ],
)
def test_kinds_of_equations(fn, kind):
    assert kind in {kind_of(e) for e in jax.make_jaxpr(fn)(jnp.ones(4)).eqns}
