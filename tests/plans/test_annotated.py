"""Annotated programs of one mesh: what is asked for holds in the compiled program, costs what it costs, and can be run.

Every program is an MLP with a classifier, (64, 16) -> 32 -> 16 -> 64 classes, planned for eight CPU devices.
"""

import itertools
import math
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import autoshard
from autoshard.annotations.block import Block, BlockKind
from autoshard.cluster import Cluster
from autoshard.errors import AnnotationError, StageError
from autoshard.planner.asked import Demand, asked_of, in_force, obeys
from autoshard.planner.program import prepare
from autoshard.trace.trace import trace

CLUSTER = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml")
BATCH, WIDTH, HIDDEN, CLASSES = 64, 16, 32, 64
replicate, split = autoshard.replicate, autoshard.split


def init(seed=0):
    up, down, head = jax.random.split(jax.random.key(seed), 3)
    draw = lambda key, *shape: jax.random.normal(key, shape) / 4
    return {"up": draw(up, WIDTH, HIDDEN), "down": draw(down, HIDDEN, WIDTH), "head": draw(head, WIDTH, CLASSES)}


def batch():
    x = jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    return x, jax.random.randint(jax.random.key(2), (BATCH,), 0, CLASSES)


def body(p, x):
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def head(p, h):
    return h @ p["head"]


def cross_entropy(logits, y):
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, y[:, None], -1)[:, 0])


def step_of(logits_of, loss_of=cross_entropy):
    def step(params, x, y):
        loss, gradients = jax.value_and_grad(lambda p: loss_of(logits_of(p, x), y))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    return step


def planned(step, **given):
    options = autoshard.PlanOptions(cache=False, **given.pop("options", {}))
    return autoshard.plan(step, jax.eval_shape(init), *batch(), cluster=CLUSTER, options=options, **given)


def plain(p, x):
    return head(p, body(p, x))


def scanned(p, x):
    layer = jax.checkpoint(lambda x, _: (body(p, x), None))
    return head(p, jax.lax.scan(layer, x, None, length=2)[0])


def beside(p, x):
    h = replicate(8)(body)(p, x)
    return split(8, dims={"classes": CLASSES})(head)(p, h)


@replicate(8)
def colocated(p, x):
    return split(8, colocate=True)(head)(p, body(p, x))


@replicate(4)
def split_in_replicas(p, x):
    return head(p, split(2)(body)(p, x))


@split(2, dims={"classes": CLASSES, "hidden": HIDDEN})
def replicas_in_split(p, x):
    return replicate(4)(plain)(p, x)


@replicate(2)
def three_deep(p, x):
    return replicate(2)(split(2, dims={"hidden": ("*.up", 1)})(body))(p, x) @ p["head"]


def all_that_is_left(p, x):
    return split(2)(replicate()(plain))(p, x)


# For each program: the unannotated one; the local shapes of the products of its forward pass; which weights those read.
NESTINGS = {
    "replicate around everything": (replicate(8)(plain), plain, [(8, 32), (8, 16), (8, 64)]),
    "split alone": (split(8)(plain), plain, None),
    "split beside replicate": (beside, plain, [(8, 32), (8, 16), (64, 8)]),
    "split in the place of replicate": (colocated, plain, [(8, 32), (8, 16), None]),
    "split in replicate": (split_in_replicas, plain, [(16, 16), (16, 16), (16, 64)]),
    "replicate in split": (replicas_in_split, plain, [(16, 16), (16, 16), (16, 32)]),
    "replicate in replicate around split": (three_deep, plain, [(16, 16), (16, 16), None]),
    "a degree left open": (all_that_is_left, plain, None),
    "in a checkpointed scan": (replicate(4)(scanned), scanned, None),
}


def products_of(compiled_text):
    """(equation, local shape of the result) of the products in compiled HLO."""
    found = re.findall(r"= f32\[([\d,]+)\]\S* dot\(.*op_name=\"[^\"]*eqn(\d+)", compiled_text)
    return {int(number): tuple(map(int, shape.split(","))) for shape, number in found}


@pytest.fixture(scope="module")
def plain_costs():
    """What the unannotated programs cost."""
    return {fn: planned(step_of(fn)).certificate for fn in (plain, scanned)}


@pytest.mark.parametrize("name", NESTINGS)
def test_nestings_hold_in_the_compiled_program_and_equal_the_step_of_one_device(name, plain_costs):
    annotated, unannotated, shapes = NESTINGS[name]
    step = step_of(annotated)
    plan = planned(step)
    run = plan.jit(step)
    given = init(), *batch()
    for ours, theirs in zip(*map(jax.tree.leaves, (run(*given), step_of(unannotated)(*given))), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    local = products_of(run.lower(*given).compile().as_text())
    operations = [o for o in trace(step, given).graph.operations if o.name == "dot_general"]
    for operation, shape in zip(operations[:3], shapes or [None] * 3, strict=True):  # those of the forward pass
        assert shape in (None, local[operation.equation])
        replicas = [b.degree or 4 for b in in_force(operation.blocks) if b.kind is BlockKind.REPLICATE]
        if replicas:
            assert local[operation.equation][0] == BATCH // math.prod(replicas)
    assert all(o.groups > 0 and o.axes for o in plan.obeyed) and len(plan.obeyed) >= 1
    # without the annotation nothing is worse
    without = plain_costs[unannotated]
    assert without.bound <= plan.certificate.objective * (1 + 1e-9)
    assert without.objective <= plan.certificate.objective * (1 + without.gap + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_removing_an_annotation_never_makes_a_plan_worse(seed):
    """Blocks drawn at random; of each, the cost with all of them is no less than with any one removed."""
    rng = np.random.default_rng(seed)
    draw = lambda: [
        (rng.choice([replicate, split]), int(rng.choice([1, 2, 4])), rng.choice(["body", "head", "both"]))
        for _ in range(rng.integers(1, 4))
    ]

    def program(blocks):
        def within(fn, where):
            for make, degree, at in blocks:
                fn = make(degree)(fn) if at == where else fn
            return fn

        def logits_of(p, x):
            return within(lambda p, x: within(head, "head")(p, within(body, "body")(p, x)), "both")(p, x)

        return step_of(logits_of)

    mesh = {"data": 4, "tensor": 2}
    for _ in range(20):
        blocks = draw()
        try:
            with_all = planned(program(blocks), mesh=mesh).certificate
        except AnnotationError:
            continue  # asks for more than there is
        for n in range(len(blocks)):
            fewer = planned(program(blocks[:n] + blocks[n + 1 :]), mesh=mesh).certificate
            assert fewer.bound <= with_all.objective * (1 + 1e-9)
            assert fewer.objective <= with_all.objective * (1 + fewer.gap + 1e-9)
        return
    pytest.fail("no blocks drawn that can be obeyed")


@pytest.mark.parametrize(
    ("sizes", "degrees"), [((4, 2), (4, 2)), ((2, 2, 2), (2, 2)), ((8,), (8, 1)), ((2, 4), (2, 8))]
)
def test_an_assignment_obeys_exactly_if_the_axes_of_each_block_make_its_degree(sizes, degrees):
    """Against counting the parts that assignments make; the second demand speaks of factors 1 and 2."""
    blocks = [Block(BlockKind.SPLIT, "", degree=d) for d in degrees]
    demands = Demand(blocks[0], frozenset({0}), degrees[1]), Demand(blocks[1], frozenset({1, 2}), degrees[0])
    some = 0
    for assignment in itertools.product((-1, 0, 1, 2), repeat=len(sizes)):
        parts = [1, 1, 1]
        for size, factor in zip(sizes, assignment, strict=True):
            if factor >= 0:
                parts[factor] *= size
        expected = parts[0] == degrees[0] and parts[1] * parts[2] == degrees[1]
        assert obeys(demands, assignment, sizes) == expected
        some += expected
    assert some or math.prod(degrees) > math.prod(sizes)


def error(logits_of, **given):
    with pytest.raises(AnnotationError) as raised:
        planned(step_of(logits_of), **given)
    return str(raised.value)


HERE = r"plans/test_annotated\.py:\d+ \(\w+\)"


def test_degrees_that_the_devices_lack_show_both_lines():
    def nested(p, x):
        with replicate(8):
            with split(2):
                return plain(p, x)

    text = error(nested)
    assert re.search(rf"`split\(2\)` at {HERE} inside `replicate\(8\)` at {HERE} together need 16 devices", text)
    assert len(set(re.findall(HERE, text))) == 2 and "there are 8" in text and "colocate=True" in text
    assert "`split(3)`" in error(split(3)(plain)) and "product divides 8" in error(split(3)(plain))


def test_nestings_that_need_more_axes_get_them_or_say_which():
    nested = replicate(2)(split(2)(plain))
    text = error(nested, options={"max_mesh_axes": 2})
    assert "PlanOptions(max_mesh_axes=3)" in text and 'mesh={"axis0": 2, "axis1": 2, "axis2": 2}' in text
    plan = planned(step_of(nested))
    assert sorted(plan.mesh_axes.values()) == [2, 2, 2]
    assert [len(o.axes) for o in plan.obeyed] == [1, 1] and plan.obeyed[0].axes != plan.obeyed[1].axes
    assert "mesh 8" in error(nested, mesh={"data": 8})


def test_dimensions_that_cannot_be_split_are_told():
    narrow = lambda p, x: split(8, dims={"few": 4})(lambda p, x: (x @ p["up"][:, :4]) @ p["down"][:4])(p, x) @ p["head"]
    assert re.search(r"`dot_general` at .*asks for 8 parts of a length of 4", error(narrow))


def test_a_length_that_two_dimensions_have_is_refused_with_both():
    forward = replicate(8, dims={"examples": BATCH})(head)
    with pytest.raises(AnnotationError) as caught:
        autoshard.plan(forward, jax.eval_shape(init), batch()[0], cluster=CLUSTER)
    text = str(caught.value)
    assert f"length {BATCH}, which 2 dimensions of `dot_general` at" in text and "test_annotated.py" in text
    ways = re.findall(r'dims=|\{"examples": \("([^"]+)", (\d)\)\}', text)
    assert len(ways) == 3 and {d for _, d in ways[1:]} == {"0", "1"}
    for pattern, d in ways[1:]:
        named = replicate(8, dims={"examples": (pattern, int(d))})(head)
        plan = autoshard.plan(named, jax.eval_shape(init), batch()[0], cluster=CLUSTER)
        assert plan.obeyed[0].groups > 0


def test_a_length_that_tied_dimensions_have_names_them_all():
    def attention(x):
        with split(4, dims={"positions": 16}):
            return jax.nn.softmax(x @ x.T) @ x

    plan = autoshard.plan(attention, jax.ShapeDtypeStruct((16, 8), "float32"), cluster=CLUSTER)
    assert plan.obeyed[0].groups > 0


def test_blocks_that_bind_nothing_are_told():
    assert "of the operations inside `split(2)`" in error(lambda p, x: split(2)(jnp.tanh)(plain(p, x)))
    assert "`split(2, heads=7)`" in error(split(2, dims={"heads": 7})(plain))
    assert "dimension that it names" in error(split(2, dims={"heads": ("*.query", 0)})(plain))
    assert "Dimensions count from 0" in error(split(2, dims={"hidden": ("*.up", 2)})(plain))
    assert "nothing is around" in error(split(8, colocate=True)(plain))
    assert "leave its degree open" in error(split()(replicate()(plain)))


def test_a_contradiction_to_a_sharding_of_the_program_shows_both():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def constrained(p, x):
        with replicate(8):
            h = jax.lax.with_sharding_constraint(x @ p["up"], NamedSharding(mesh, PartitionSpec(None, "data")))
            return h @ p["down"] @ p["head"]

    text = error(constrained, mesh={"data": 8})
    assert "contradict" in text and len(re.findall(HERE, text)) >= 2


def test_stages_need_a_train_step():
    @autoshard.pipeline()
    def staged(p, x):
        return autoshard.stage()(plain)(p, x)

    with pytest.raises(StageError, match=rf"`pipeline\(\)` at {HERE.split(':')[0]}.*autoshard.TrainStep"):
        planned(step_of(staged))


def test_without_examples_a_dimension_is_named():
    forward = lambda p, x: plain(p, x)
    shapes = jax.eval_shape(init), batch()[0]
    with pytest.raises(AnnotationError, match="dims="):
        autoshard.plan(replicate(8)(forward), *shapes, cluster=CLUSTER)
    named = replicate(8, dims={"examples": ("x", 0)})(split(1, dims={"classes": ("*.head", 1)})(forward))
    plan = autoshard.plan(named, *shapes, cluster=CLUSTER, options=autoshard.PlanOptions(cache=False))
    assert plan.obeyed[0].groups > 0


def test_a_plan_tells_what_was_asked_for(tmp_path):
    plan = planned(step_of(beside))
    assert [o.asked for o in plan.obeyed] == ["replicate(8)", "split(8, classes=64)"]
    assert "Asked for by annotations" in str(plan) and all(o.line in str(plan) for o in plan.obeyed)
    plan.save(tmp_path / "plan.json")
    assert autoshard.load(tmp_path / "plan.json") == plan
    assert "Asked for" not in str(planned(step_of(plain)))


def test_what_need_not_obey_is_free_and_counted():
    """A sort over the examples has no way to split them."""

    @replicate(8)
    def sorting(p, x):
        return plain(p, x) + jnp.sort(x @ p["head"], axis=0)

    plan = planned(step_of(sorting))
    (asked,) = plan.obeyed
    assert asked.groups > 0


def test_baselines_do_as_they_say():
    """A strategy is what its literature says, whatever the program asks for."""
    args = jax.eval_shape(init), *batch()
    options = autoshard.PlanOptions(cache=False)
    one, other = (
        autoshard.baselines.data_parallel(step_of(fn), *args, cluster=CLUSTER, options=options)
        for fn in (split(8)(plain), plain)
    )
    assert one.estimate.step_s == other.estimate.step_s and one.obeyed == ()


def test_what_is_asked_of_a_program_does_not_depend_on_unrelated_code():
    graph = trace(step_of(split_in_replicas), (jax.eval_shape(init), *batch())).graph
    program = prepare(graph)
    asked = asked_of(program)
    assert asked is not None
    for group in program.groups:
        if not any(graph.operations[o].blocks for o in group.operations):
            assert asked.of_groups[group.index] == ()
