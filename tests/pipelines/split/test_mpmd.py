"""Programs split by submesh: what runs where and when, what is sent, and that nothing of the whole is lost."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autoshard.errors import TraceError
from autoshard.pipelines.split.infer_submeshes import infer_submeshes
from autoshard.pipelines.split.mpmd import split_mpmd
from autoshard.pipelines.split.mpmd_program import MpmdProgram

HOMES = (0, 1, 0, 2)
"""Places of the parameters below, in the order of the leaves."""
PARAMETERS = {name: jax.ShapeDtypeStruct((40, 40), jnp.float32) for name in "abcd"}
"""6400 bytes each: more than is sent without a word."""


def split_update(optimizer: optax.GradientTransformation) -> MpmdProgram:
    """The update of an optimizer as (gradients, state, parameters) -> (state, parameters), split."""

    def update(gradients, state, parameters):
        updates, state = optimizer.update(gradients, state, parameters)
        return state, optax.apply_updates(parameters, updates)

    state = jax.eval_shape(optimizer.init, PARAMETERS)
    closed = jax.make_jaxpr(update)(PARAMETERS, state, PARAMETERS)
    count = len(jax.tree.leaves(state))
    successors = {k: k + 4 for k in range(count + 4)}
    submeshes = infer_submeshes(closed, (*HOMES, *[None] * count, *HOMES), successors)
    return split_mpmd(closed, submeshes, 3, {k: submeshes[i] for k, i in successors.items()})


def jaxpr_of(program, one):
    """What one submesh runs in one level, as a closed jaxpr."""
    return jax.make_jaxpr(one)(
        *(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in map(program.avals.__getitem__, one.inputs))
    )


def primitives(jaxpr) -> list[str]:
    return [e.primitive.name for e in jaxpr.jaxpr.eqns]


def run(program: MpmdProgram, inputs) -> list[list]:
    """The outputs, as each submesh that must have them has them; a submesh reads only what it has."""
    arrays = {
        (v, p): x
        for v, (x, owner) in enumerate(zip(inputs, program.inputs, strict=True))
        for p in range(program.num_submeshes)
        if owner in (None, p)
    }
    for level in program.levels:
        for exchange in level.exchanges:
            arrays.update({(v, p): arrays[v, exchange.source] for v in exchange.values for p in exchange.targets})
        for one in level.programs:
            outputs = one(*(arrays[v, one.submesh] for v in one.inputs))
            arrays.update({(v, one.submesh): x for v, x in zip(one.outputs, outputs, strict=True)})
    return [[arrays[v, p] for p in program.holders(k)] for k, v in enumerate(program.outputs)]


def test_an_update_without_a_norm_is_one_level_and_sends_nothing():
    program = split_update(optax.adamw(1e-3))
    assert program.inputs[4:13] == (None, *HOMES, *HOMES)  # count, first and second moments
    assert program.output_submeshes == (None, *HOMES, *HOMES, *HOMES)
    (level,) = program.levels
    assert level.exchanges == ()
    assert [len(p.inputs) for p in level.programs] == [9, 5, 5]  # count; gradient, moments and parameter of each leaf


def test_clipping_sends_partial_squares_and_adds_them_on_each_submesh_in_the_order_of_the_whole():
    program = split_update(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)))
    first, second = program.levels
    # The norm is sqrt(((0 + a) + b) + c) + d), with a and c on submesh 0: it sends 0 + a and c to both others.
    assert [(len(x.values), x.source, x.targets, x.size_bytes) for x in second.exchanges] == [
        (2, 0, (1, 2), 8),
        (1, 1, (0, 2), 4),
        (1, 2, (0, 1), 4),
    ]
    assert program.exchanged_bytes == 32 and first.exchanges == ()
    assert [[o.shape for o in jaxpr_of(program, p).out_avals] for p in first.programs] == [[(), ()], [()], [()]]
    for one in second.programs:
        names = primitives(jaxpr_of(program, one))
        assert names[: names.index("sqrt")] == ["add"] * 3


def test_the_state_of_a_mask_or_of_a_group_lies_with_its_parameters():
    groups = {"a": "adam", "b": "sgd", "c": "sgd", "d": "adam"}
    multi = optax.multi_transform({"adam": optax.adam(1e-3), "sgd": optax.sgd(1e-3, momentum=0.9)}, groups)
    assert split_update(multi).inputs[4:-4] == (None, 0, 2, 0, 2, 1, 0)
    clip = optax.masked(optax.clip_by_global_norm(1.0), {"a": True, "b": False, "c": True, "d": False})
    assert len(split_update(optax.chain(clip, optax.sgd(0.1))).levels) == 1  # a and c share a submesh


def test_factored_moments_and_their_sums_stay_on_the_submesh_of_their_parameter():
    optimizer = optax.adafactor(1e-3, min_dim_size_to_factor=8)
    program = split_update(optimizer)
    assert len(program.levels) == 1 and program.exchanged_bytes == 0
    assert program.inputs[4:17] == (None, *HOMES, *HOMES, *[0] * 4)  # count, rows, columns, stand-ins for moments
    finite = split_update(optax.apply_if_finite(optimizer, 3))
    assert finite.exchanged_bytes == 4 * 2  # the flags, as below; no stand-in is sent


def test_a_conditional_over_the_whole_state_is_cut_by_submesh():
    program = split_update(optax.apply_if_finite(optax.sgd(0.1, momentum=0.9), 3))
    assert len(program.levels) == 2
    assert program.exchanged_bytes == 4 * 2  # each of four flags, one byte, to two other submeshes
    for one in program.levels[1].programs:
        (cond,) = [e for e in jaxpr_of(program, one).jaxpr.eqns if e.primitive.name == "cond"]
        own = 2 if one.submesh == 0 else 1
        assert sum(v.aval.shape == (40, 40) for v in cond.invars) == 2 * own  # gradients and traces of its own
        assert sum(v.aval.shape == (40, 40) for v in cond.outvars) == 2 * own


def test_a_norm_inside_a_conditional_is_exchanged_between_its_pieces():
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    program = split_update(optax.apply_if_finite(clipped, 3))
    assert len(program.levels) == 3  # flags; squares, in a conditional; the rest, in another
    assert program.exchanged_bytes == 4 * 2 + 32


def test_large_values_of_several_submeshes_meet_where_most_bytes_are():
    def mix(small, large):
        return jnp.concatenate([small, large]).sum(), small + 1

    closed = jax.make_jaxpr(mix)(jnp.zeros(2000), jnp.zeros(3000))
    program = split_mpmd(closed, (0, 1))
    assert program.output_submeshes == (1, 0)
    assert len(program.levels) == 1  # an input is sent before the first
    assert program.exchanged_bytes == 8000


def test_outputs_are_put_where_they_are_wanted():
    closed = jax.make_jaxpr(lambda x, n: (x * 2, n + 1, x.sum()))(jnp.ones(2000), 0)
    default = split_mpmd(closed, (1, None), 2)
    assert default.output_submeshes == (1, None, 1) and default.exchanged_bytes == 0
    moved = split_mpmd(closed, (1, None), 2, {0: 0, 2: None})
    assert moved.output_submeshes == (0, None, None) and moved.exchanged_bytes == 8000 + 4
    outputs = run(moved, [jnp.ones(2000), 3])
    assert [len(copies) for copies in outputs] == [1, 2, 2] and float(outputs[2][0]) == 2000


def test_an_input_that_meets_nothing_belongs_where_its_next_version_is_made():
    closed = jax.make_jaxpr(lambda g, last, unused: (g * 2, unused))(*[jnp.zeros(5)] * 3)
    assert infer_submeshes(closed, (1, None, None), {0: 1}) == (1, 1, 0)


def test_small_state_that_meets_several_submeshes_belongs_everywhere():
    closed = jax.make_jaxpr(lambda x, y, table, n: (x * table[0], y * table[n], n + 1))(
        jnp.zeros(5), jnp.zeros(5), jnp.zeros(2), 0
    )
    assert infer_submeshes(closed, (1, 0, None, None)) == (1, 0, None, 0)  # the number meets values of submesh 0 only
    assert split_mpmd(closed, (1, 0, None, 0)).exchanged_bytes == 0


def test_side_effects_in_a_conditional_over_several_submeshes_are_refused():
    def report(x, y, flag):
        def branch(x, y):
            jax.debug.print("{}", x.sum())
            return x + 1, y + 1

        return jax.lax.cond(flag, branch, lambda x, y: (x, y), x, y)

    closed = jax.make_jaxpr(report)(jnp.zeros(3), jnp.zeros(3), True)
    with pytest.raises(TraceError, match=r"test_mpmd.py:\d+ \(report\).*side effects|side effects.*test_mpmd.py"):
        split_mpmd(closed, (0, 1, None))


def test_a_side_effect_happens_once(capsys):
    def report(x, y, n):
        jax.debug.print("step {}", n)
        return x + n, y + n

    closed = jax.make_jaxpr(report)(jnp.zeros(3), jnp.zeros(3), 1)
    program = split_mpmd(closed, (0, 1, None))
    assert program.output_submeshes == (0, 1) and len(program.levels) == 1
    run(program, [jnp.zeros(3), jnp.zeros(3), 7])
    jax.effects_barrier()
    assert capsys.readouterr().out == "step 7\n"


@pytest.mark.parametrize(
    ("submeshes", "outputs", "message"),
    [((0,), {}, "2 inputs, but 1"), ((0, 2), {}, "input 1 has 2"), ((0, 1), {0: 5}, "output 0 has 5")],
)
def test_submeshes_that_do_not_fit_are_refused(submeshes, outputs, message):
    closed = jax.make_jaxpr(lambda x, y: x + y)(1.0, 2.0)
    with pytest.raises(TraceError, match=message):
        split_mpmd(closed, submeshes, 2, outputs)


def random_program(seed: int):
    """A function of arrays and scalars, and the submeshes of its inputs: arithmetic, sums, and conditionals on them."""
    choose = random.Random(seed)
    shapes = [choose.choice([(), (3,), (1100,)]) for _ in range(6)]
    submeshes = [choose.choice([None, 0, 1, 2] if s == () else [0, 1, 2]) for s in shapes]

    def combine(choose, values):
        for _ in range(choose.randint(3, 9)):
            kind, x, y = choose.choice(["add", "sum", "scale"]), choose.choice(values), choose.choice(values)
            if kind == "sum":
                values.append(jnp.sum(x) * 0.01)
            elif kind == "scale" or x.shape == y.shape:
                values.append(x * jnp.tanh(y if y.shape in ((), x.shape) else y.mean()) + 0.1)
        return values

    def function(*inputs):
        choose = random.Random(seed)
        values = combine(choose, list(inputs))
        picked = choose.sample(values, 5)
        inner = choose.random()

        def branch(*given):
            made = combine(random.Random(inner), list(given))
            pairs = zip(given, [next((m for m in reversed(made) if m.shape == g.shape), g) for g in given], strict=True)
            return tuple(m for _, m in pairs)

        values += jax.lax.cond(jnp.sum(choose.choice(values)) > 0.2, branch, lambda *given: given, *picked)
        return combine(choose, values)

    inputs = [np.asarray(np.random.default_rng(seed + k).normal(size=s), np.float32) for k, s in enumerate(shapes)]
    return function, inputs, submeshes


@pytest.mark.parametrize("seed", range(10))
def test_a_split_program_computes_what_the_whole_does(seed):
    function, inputs, submeshes = random_program(seed)
    closed = jax.make_jaxpr(function)(*inputs)
    wanted = {0: None, len(closed.jaxpr.outvars) - 1: seed % 3}
    program = split_mpmd(closed, submeshes, 3, wanted)
    expected = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *inputs)
    for copies, whole in zip(run(program, inputs), expected, strict=True):
        for one in copies:
            np.testing.assert_allclose(one, whole, rtol=1e-6, atol=1e-6)
            assert one.dtype == whole.dtype
