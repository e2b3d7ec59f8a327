"""Annotations of pipelines and stages: read from the loss, obeyed by the search, seen in compiled phases, refused."""

import importlib.util
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard import PlanOptions, StageOptions
from autoshard.annotations.block import Block, BlockKind
from autoshard.errors import AnnotationError
from autoshard.pipelines.cost.stage_meshes import stage_meshes
from autoshard.pipelines.search.asked_stages import AskedStages, asked_stages
from autoshard.pipelines.search.search import search
from autoshard.pipelines.split.annotated_stages import AskedPipeline
from autoshard.pipelines.split.forward import trace_forward
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries, find_layers

_spec = importlib.util.spec_from_file_location("case", pathlib.Path(__file__).with_name("case.py"))
case = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(case)
chain, cluster, plain_table = case.chain, case.cluster, case.plain_table

WIDTH, HIDDEN, NUM_LAYERS, BATCH = 16, 32, 4, 16
BYTES = {"weight": 1e6, "residual": 1e5, "inputs": 1e4}
HERE = r"pipelines/test_annotated\.py:\d+ \([\w<>]+\)"
pipeline, stage, replicate, split = autoshard.pipeline, autoshard.stage, autoshard.replicate, autoshard.split


def init(seed=0):
    keys = jax.random.split(jax.random.key(seed), 2 * NUM_LAYERS)
    draw = lambda key, *shape: jax.random.normal(key, shape) / 4
    pairs = zip(keys[::2], keys[1::2], strict=True)
    return [{"up": draw(up, WIDTH, HIDDEN), "down": draw(down, HIDDEN, WIDTH)} for up, down in pairs]


BATCHES = {k: jax.random.normal(jax.random.key(n), (BATCH, WIDTH)) for n, k in enumerate("xy")}


def layer(p, x):
    return x + jax.nn.relu(x @ p["up"]) @ p["down"]


def layers(ps, x):
    for p in ps:
        x = layer(p, x)
    return x


def step_of(model):
    loss = lambda params, batch, rng: (jnp.mean((model(params, batch["x"]) - batch["y"]) ** 2), {})
    return autoshard.TrainStep(loss, optax.sgd(0.1))


def forward_of(model):
    step = step_of(model)
    return trace_forward(step, jax.eval_shape(lambda: step.init(init())), BATCHES, 4)


def refused(model):
    with pytest.raises(AnnotationError) as raised:
        forward_of(model)
    return str(raised.value)


def two_stages(ps, x):
    with replicate(2), pipeline(2):
        with stage():
            x = layers(ps[:3], x)
        with stage():
            return layers(ps[3:], x)


def test_stages_are_read_in_the_order_in_which_they_run():
    asked = forward_of(two_stages).asked
    assert asked is not None
    assert (asked.num_stages, asked.num_pipelines, asked.pipeline.num_micro_batches) == (2, 2, 2)
    (_, last), (first, _) = asked.spans
    assert asked.spans[0][0] == 0 and first == last + 1
    assert forward_of(layers).asked is None


def test_blocks_around_the_pipeline_are_no_matter_of_its_stages():
    stacks = [str(e.source_info.name_stack) for e in forward_of(two_stages).jaxpr.eqns]
    assert not any("autoshard.replicate" in s for s in stacks) and any("autoshard.stage" in s for s in stacks)


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_layer_begins_between_any_two_stages(cut):
    @pipeline()
    def model(ps, x):
        x = stage()(layers)(ps[:cut], x)
        return stage()(layers)(ps[cut:], x)

    forward = forward_of(model)
    found, plain = find_layers(forward), find_layers(forward_of(layers))
    (_, last), (first, _) = forward.asked.spans
    assert any(last < start <= first for start in found.starts)
    assert found.num_layers == plain.num_layers  # where the planner would have cut there is no second cut


def test_code_between_stages_goes_where_least_crosses():
    """A layer in no stage: what may hold it are both of its neighbours, alone or together with others."""

    @pipeline()
    def model(ps, x):
        x = stage()(layers)(ps[:1], x)
        x = layers(ps[1:3], x)
        return stage()(layers)(ps[3:], x)

    forward = forward_of(model)
    cuts = find_layers(forward)
    asked = asked_stages(forward.asked, cuts, cluster(2))
    (_, last), (first, _) = forward.asked.spans
    borders = [k for k in range(1, cuts.num_layers) if asked.runs[0][0, k]]
    assert borders == [k for k, start in enumerate(cuts.starts) if last < start <= first] and len(borders) > 1
    assert [k for k in range(cuts.num_layers) if asked.runs[1][k, cuts.num_layers]] == borders


@pytest.mark.parametrize("seed", range(20))
def test_runs_of_layers_that_a_stage_may_hold(seed):
    """Against the definition: all equations of the stage, and none of another one."""
    rng = np.random.default_rng(seed)
    stop = int(rng.integers(6, 14))
    starts = (0, *sorted(rng.choice(np.arange(1, stop), int(rng.integers(1, 5)), replace=False).tolist()))
    owner = np.sort(rng.integers(0, 3, stop))  # of each equation, its stage; -1 for none
    owner = np.where(rng.random(stop) < 0.3, -1, owner)
    stages = sorted(set(owner.tolist()) - {-1})
    blocks = tuple(Block(BlockKind.STAGE, "", (0, s)) for s in stages)
    spans = tuple((int(np.flatnonzero(owner == s)[0]), int(np.flatnonzero(owner == s)[-1])) for s in stages)
    if not stages:
        return
    asked = AskedPipeline(Block(BlockKind.PIPELINE, ""), (), blocks, spans)
    cuts = LayerBoundaries(starts, stop, tuple(map(str, starts)))
    found = asked_stages(asked, cuts, cluster(1))
    edges = (*starts, stop)
    for (number, s), (i, j) in itertools.product(enumerate(stages), itertools.combinations(range(len(edges)), 2)):
        held = owner[edges[i] : edges[j]]
        expected = set(held.tolist()) <= {s, -1} and (held == s).sum() == (owner == s).sum()
        assert found.runs[number][i, j] == expected


@pytest.mark.parametrize("seed", range(6))
def test_the_search_keeps_to_stages_and_devices_and_is_never_better_for_it(seed):
    rng = np.random.default_rng(seed)
    devices, kinds = cluster(2, 2), [int(k) for k in rng.integers(0, 2, 5)]
    table, model = plain_table(devices, 2, (1, 2), (1, 2), **BYTES), chain(kinds, 1e4)
    cut = sorted(rng.choice(np.arange(1, 5), 2, replace=False).tolist())
    edges = [0, *cut, 5]
    runs = []
    for s in range(3):
        allowed = np.zeros((6, 6), dtype=bool)
        allowed[edges[s], edges[s + 1]] = True
        runs.append(allowed)
    first, middle = (int(n) for n in rng.integers(0, 2, 2))
    slices = tuple(frozenset({n}) for n in (first, middle, 1 - first))
    asked = AskedStages(tuple(runs), slices)
    options = StageOptions(num_stages=3)
    found = search(model, table, devices, 4, options, asked=asked)
    for p in found.arrangement.pipelines:
        assert [s.start for s in p.stages] == edges[:-1]
        assert all(p.submeshes[s % len(p.submeshes)].slice in slices[s] for s in range(3))
    free = search(model, table, devices, 4, StageOptions())
    assert free.bound_s <= found.step_s * (1 + 1e-9)
    assert free.step_s <= found.step_s * (1 + 1e-9)


def test_the_number_of_pipelines_can_be_fixed():
    devices = cluster(4)
    table, model = plain_table(devices, 1, (1, 2, 4), (1,), **BYTES), chain([0] * 4, 1e4)
    for number in (1, 2, 4):
        found = search(model, table, devices, 8, StageOptions(num_pipelines=number))
        assert len(found.arrangement.pipelines) == number


def test_meshes_for_degrees_inside_a_stage():
    """Two replicas of a layer split in two need a mesh of two axes; four devices of a node have one axis otherwise."""
    (part,) = cluster(4).slices()
    nested = [(Block(BlockKind.REPLICATE, "", degree=2), Block(BlockKind.SPLIT, "", degree=2))]
    shapes = lambda meshes: sorted(m.shape for m in meshes)
    assert shapes(stage_meshes(part, 4)) == [(1,), (2,), (4,)]
    assert shapes(stage_meshes(part, 4, nested)) == [(1,), (2,), (2, 2), (4,)]


def nested(ps, x):
    with replicate(2):
        with pipeline(2):
            with stage():
                x = replicate(2)(layers)(ps[:2], x)
            with stage():
                x = split(2)(layers)(ps[2:], x)
    return x


def test_nested_annotations_are_obeyed_in_stages_and_equal_the_step_of_one_device():
    """Two pipelines of two stages of two devices: one with its examples in two parts, one with its weights."""
    step = step_of(nested)
    start = lambda seed: step.init(init(seed))
    stages = StageOptions(most_devices_per_stage=2)
    options = PlanOptions(cache=False)
    plan = autoshard.plan(step, jax.eval_shape(start, 0), BATCHES, donate_argnums=0, stages=stages, options=options)
    assert [o.got for o in plan.obeyed][:2] == ["2 pipelines", "2 stages, 2 micro-batches"]
    assert all(o.line in str(plan) for o in plan.obeyed)
    (first, second) = plan.pipeline(0).stages
    examples = plan.pipeline(0).micro_batch_size
    assert (len(plan.arrangement.pipelines), examples) == (2, BATCH // 4)
    assert [o.asked for p in plan.programs for o in p.obeyed] == ["replicate(2)", "split(2)"]
    run = plan.jit(step)
    state = plan.init(start, 0, run=run)
    expected = start(0)
    for _ in range(2):
        state, metrics = run(state, BATCHES)
        expected, alone = step(expected, BATCHES)
        np.testing.assert_allclose(metrics["loss"], alone["loss"], rtol=1e-5)
    for ours, theirs in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected.params), strict=True):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-6)


def test_an_annotated_step_is_cut_without_being_told_to_and_obeys_kinds_of_devices(mixed_cluster):
    """The slow device comes first because it is asked for."""

    @pipeline(2)
    def model(ps, x):
        x = stage(devices="slow")(layers)(ps[:1], x)
        return stage(devices="CPU-generic")(layers)(ps[1:], x)

    step = step_of(model)
    state = jax.eval_shape(lambda: step.init(init()))
    plan = autoshard.plan(step, state, BATCHES, cluster=mixed_cluster, options=PlanOptions(cache=False))
    assert plan.is_staged and [o.got for o in plan.obeyed][1:] == ["stage 0 on CPU-slow", "stage 1 on CPU-generic"]
    for p in plan.arrangement.pipelines:
        assert [plan.slices[s.slice].device for s in p.submeshes] == ["CPU-slow", "CPU-generic"]
    wrong = step_of(lambda ps, x: pipeline()(stage(devices="tpu")(layers))(ps, x))
    with pytest.raises(AnnotationError, match=rf"`stage\(devices=\"tpu\"\)` at {HERE}.*CPU-generic, CPU-slow"):
        autoshard.plan(wrong, state, BATCHES, cluster=mixed_cluster, options=PlanOptions(cache=False))
    other = StageOptions(num_micro_batches=4)
    with pytest.raises(AnnotationError, match="num_micro_batches=2 and StageOptions"):
        autoshard.plan(step, state, BATCHES, cluster=mixed_cluster, stages=other, options=PlanOptions(cache=False))


def test_degrees_that_no_stage_can_have_are_told(mixed_cluster):
    step = step_of(lambda ps, x: pipeline()(stage()(replicate(5)(layers)))(ps, x))
    state = jax.eval_shape(lambda: step.init(init()))
    with pytest.raises(AnnotationError, match=r"`replicate\(5\)` at"):
        autoshard.plan(step, state, BATCHES, cluster=mixed_cluster, options=PlanOptions(cache=False))


def test_micro_batches_that_cannot_obey_are_left_out(mixed_cluster):
    """One example alone cannot be split in two."""

    def model(ps, x):
        with replicate(2):
            return layers(ps, x)

    step = step_of(model)
    state = jax.eval_shape(lambda: step.init(init()))
    sizes = lambda *sizes: StageOptions(micro_batch_sizes=sizes, schedules=("gpipe",), most_candidates=2)
    plan = lambda *own: autoshard.plan(
        step, state, BATCHES, cluster=mixed_cluster, options=PlanOptions(cache=False), stages=sizes(*own)
    )
    assert {p.micro_batch_size for p in plan(1, 8).arrangement.pipelines} == {8}
    with pytest.raises(AnnotationError, match=rf"`replicate\(2\)` at {HERE} none has .* An example alone cannot be"):
        plan(1)


def test_what_cannot_be_cut_is_refused():
    stacked = lambda ps: jax.tree.map(lambda *a: jnp.stack(a), *ps)
    in_loop = lambda ps, x: jax.lax.scan(lambda x, p: (stage()(layer)(p, x), None), x, stacked(ps))[0]
    told = rf"`stage\(\)` at {HERE} stands inside the `scan` at {HERE}.*for layer in layers.*with autoshard.stage\(\):"
    assert re.search(told, refused(pipeline()(in_loop)))
    kept = lambda ps, x: pipeline()(lambda x: jax.checkpoint(lambda x: stage(devices="v100")(layers)(ps, x))(x))(x)
    told = rf'inside the `jax.checkpoint` at {HERE}.*with autoshard.stage\(devices="v100"\): x = jax.checkpoint'
    assert re.search(told, refused(kept))
    one_way = lambda ps, x: jax.lax.cond(x[0, 0] > 0, lambda x: stage()(layers)(ps, x), lambda x: x, x)
    assert re.search(rf"inside the `cond` at {HERE}.*Put `with autoshard.stage\(\):`", refused(pipeline()(one_way)))


def test_misplaced_stages_are_refused_with_their_lines():
    assert "none is around" in refused(stage()(layers))
    assert "cannot hold another" in refused(pipeline()(stage()(stage()(layers))))
    assert "cannot hold another" in refused(pipeline()(pipeline()(layers)))
    first, second = (
        pipeline()(layers),
        pipeline()(layers),
    )
    text = refused(lambda ps, x: second(ps[2:], first(ps[:2], x)))
    assert "one pipeline" in text and len(set(re.findall(HERE, text))) == 2
    assert "pipelines side by side" in refused(split(2)(pipeline()(layers)))
    assert "there are 1" in refused(pipeline(num_stages=2)(stage()(layers)))
