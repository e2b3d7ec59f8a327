"""A plan in stages does what every plan does: it is verified, compared, exported, explained, and makes its state."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import autoshard
from autoshard.errors import ConfigError, ExportError, PlanMismatchError, StageError
from autoshard.pipelines.search.alternative import Alternative
from autoshard.plans.logical import LogicalAxes


@pytest.fixture(scope="module")
def reloaded(subject, tmp_path_factory):
    """The plan as a file holds it."""
    path = tmp_path_factory.mktemp("plan") / "staged.json"
    subject.plan.save(path)
    assert set(re.findall(r"\w+/\w+\.py", path.read_text())) == {"pipelines/conftest.py"}  # lines of the user alone
    return autoshard.load(path)


def test_both_kinds_have_one_face(subject):
    (program, *_) = subject.plan.programs
    assert isinstance(program, autoshard.Plan) and program.programs == (program,)
    assert (program.is_staged, subject.plan.is_staged) == (False, True)
    assert program.device_types == ("CPU-generic",) and subject.plan.device_types == ("CPU-generic", "CPU-slow")
    assert subject.plan.explain(0).partition("\n")[2] == str(program) and str(subject.plan) == subject.plan.explain()


def test_each_program_is_verified_without_arguments(subject, reloaded):
    found = subject.plan.verify(subject.step, target="cpu")
    assert [o.plan for o in found.outcomes] == [p.name for p in subject.plan.programs]
    assert str(found).count("compiled for CPU-generic") == len(subject.plan.programs)
    assert found.is_confirmed == (not any(o.disagreements for o in found.outcomes))
    with pytest.raises(PlanMismatchError, match="read from a file"):
        reloaded.verify(subject.step, target="cpu")
    again = reloaded.verify(subject.step, subject.state, subject.batch, target="cpu")
    figures = lambda report: [(o.flows, o.predicted_memory, o.compiled_memory) for o in report.outcomes]
    assert figures(again) == figures(found)


def test_devices_that_no_compiler_knows_stand_in_the_report(subject):
    found = subject.plan.verify(subject.step)  # the slow CPUs are a device type of the test's own
    slow = [p.device == "CPU-slow" for p in subject.plan.programs]
    assert any(slow) and not all(slow)
    assert [hasattr(o, "reason") for o in found.outcomes] == slow
    assert not found.is_confirmed and "CPU-slow" in str(found)


def test_the_difference_of_a_plan_with_itself_is_empty(subject, reloaded):
    found = autoshard.diff(subject.plan, reloaded)
    assert found.is_empty and found.step_s == 0
    assert "decide the same" in str(found)


def test_a_difference_tells_pipelines_and_programs(subject):
    plan = subject.plan
    first, second = plan.arrangement.pipelines
    faster = dataclasses.replace(second, micro_batch_size=1, num_micro_batches=2)
    (argument, *rest) = plan.programs[0].arguments
    other = dataclasses.replace(plan.programs[0], arguments=(dataclasses.replace(argument, name="renamed"), *rest))
    changed = dataclasses.replace(
        plan,
        arrangement=dataclasses.replace(plan.arrangement, pipelines=(first, faster)),
        programs=(other, *plan.programs[1:]),
        owners=(plan.owners[-1], *plan.owners[1:]),
    )
    found = plan.diff(changed)
    assert [(c.pipelines, c.stage, c.what, c.before, c.after) for c in found.stages] == [
        ((1,), None, "micro-batches", "1 x 2", "2 x 1")
    ]
    assert found.a.peak_bytes == plan.timeline.fullest.peak_bytes
    assert [(c.a, c.b) for c in found.programs] == [(0, 0)] and not found.programs[0].diff.is_empty
    assert [path for path, _, _ in found.owners] == [plan.parameters[0]]
    assert "2 x 1" in str(found) and "renamed" in str(found) and plan.parameters[0] in str(found)
    document = json.loads(found.json())
    assert document["stages"][0]["after"] == "2 x 1" and document["programs"][0]["diff"]["layouts"]


def test_plans_of_two_kinds_are_not_compared(subject):
    for one, other in ((subject.plan, subject.plan.programs[0]), (subject.plan.programs[0], subject.plan)):
        with pytest.raises(PlanMismatchError, match="in stages"):
            autoshard.diff(one, other)


def test_shardings_are_exported_stage_by_stage(subject):
    plan, document = subject.plan, json.loads(subject.plan.export("shardings"))
    assert [[stage["program"] for stage in row] for row in document["pipelines"]] == [list(r) for r in plan.program_of]
    assert [p["mesh"] for p in document["programs"]] == [[list(a) for a in p.axes] for p in plan.programs]
    paths = [[row["path"] for row in p["arguments"]] for p in document["programs"]]
    assert paths == [[a.name for a in p.arguments] for p in plan.programs]
    assert document["owners"].keys() == set(plan.parameters)


def test_rules_are_exported_for_each_program(subject, tmp_path):
    texts = list(yaml.safe_load_all(subject.plan.export("flax-rules")))
    assert len(texts) == len(subject.plan.programs)
    for text, program in zip(texts, subject.plan.programs, strict=True):
        (tmp_path / "one.yaml").write_text(yaml.safe_dump(text))
        axes = LogicalAxes.load(tmp_path / "one.yaml")
        rules = dict(axes.axes)
        for a in program.arguments:
            if a.shape:
                assert tuple(rules[n] if n else () for n in axes.names_of(a.name)) == a.entries, a.name


def test_a_form_that_holds_one_mesh_says_which_stages_it_cannot_hold(subject):
    with pytest.raises(ExportError, match="stage 1 of pipeline 0 on slow.*CPU-slow"):
        subject.plan.export("maxtext")
    with pytest.raises(ConfigError, match="flax-rules, maxtext, shardings"):
        subject.plan.export("onnx")


def test_a_plan_stands_beside_the_forms_that_were_looked_at(subject):
    forms = (
        Alternative("fast alone: 2 x 1 stage", 0.03),
        Alternative("slow alone", None, "does not fit the memory"),
        Alternative("a replica group on each slice: shares by speed", 0.02),
        Alternative("a replica group on each slice: even shares", 0.025),
    )
    certificate = dataclasses.replace(subject.plan.certificate, searched_s=0.02, bound_s=0.019)
    found = dataclasses.replace(subject.plan, considered=forms, certificate=certificate).compare(subject.step)
    assert [(c.name, c.relative_step) for c in found.contenders] == [
        ("autoshard (a replica group on each slice: shares by speed)", 1.0),
        ("a replica group on each slice: even shares", pytest.approx(1.25)),
        ("fast alone: 2 x 1 stage", pytest.approx(1.5)),
        ("slow alone", None),
    ]
    assert "20.0% less time" in " ".join(str(found).split()) and "does not fit the memory" in str(found)
    assert json.loads(found.json())["contenders"][1]["step_s"] == 0.025


def test_a_step_in_stages_is_compared_with_other_forms(subject, mixed_cluster):
    found = autoshard.compare(subject.step, subject.state, subject.batch, cluster=mixed_cluster, title="four layers")
    assert found.contenders[0].relative_step == 1.0 and len(found.contenders) > 2
    assert all(c.step_s is None or c.step_s >= found.contenders[0].step_s for c in found.contenders)
    assert any("fast alone" in c.name for c in found.contenders)
    with pytest.raises(StageError, match="strategies"):
        autoshard.compare(
            subject.step, subject.state, subject.batch, cluster=mixed_cluster, strategies=autoshard.baselines.ALL[:1]
        )


def test_the_state_is_made_where_the_plan_says(subject):
    def init(seed):
        fill = lambda x: jnp.full(x.shape, seed, x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else None
        params = jax.tree.map(fill, subject.state.params)
        return subject.step.init(params)

    run = subject.plan.jit(subject.step, jax.devices()[:3])
    state = subject.plan.init(init, 2, run=run)
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(run.shardings), strict=True):
        assert leaf.sharding == sharding
    np.testing.assert_array_equal(jax.tree.leaves(state.params)[0], 2)
    with pytest.raises(StageError, match="run="):
        subject.plan.init(init, 2)


def test_a_step_that_says_its_micro_batches_keeps_them(subject, mixed_cluster):
    """The search would choose others; the step of one device in the same parts is what runs."""
    step = subject.step.in_parts((3, 3))
    plan = autoshard.plan(step, subject.state, subject.batch, cluster=mixed_cluster)
    assert plan.parts == step.parts != subject.plan.parts
    fill = lambda x: jnp.linspace(0.1, 1, x.size, dtype=x.dtype).reshape(x.shape)
    state, batch = step.init(jax.tree.map(fill, subject.state.params)), jax.tree.map(fill, subject.batch)
    found = plan.jit(step, jax.devices()[:3])(state, batch)
    for got, wanted in zip(*map(jax.tree.leaves, (found, step(state, batch))), strict=True):
        if not jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(got, wanted, rtol=1e-5)
    with pytest.raises(PlanMismatchError, match=r"\(2, 2, 2\) examples; received a TrainStep with parts of \(3, 3\)"):
        subject.plan.jit(step, jax.devices()[:3]).prepare(subject.state, subject.batch)
    for parts, sizes, message in (
        ((2, 4), None, "of one size; received a TrainStep with parts of 2 and 4"),
        ((3, 3), (1, 2), r"parts of 3, and StageOptions.micro_batch_sizes \(plan.stages\) of 1 or 2 examples"),
        ((3, 2), None, r"5 in all, for a batch of 6"),
    ):
        with pytest.raises(StageError, match=message):
            autoshard.plan(
                subject.step.in_parts(parts),
                subject.state,
                subject.batch,
                cluster=mixed_cluster,
                stages=autoshard.StageOptions(micro_batch_sizes=sizes),
            )


def test_what_is_no_step_does_not_fit(subject):
    with pytest.raises(PlanMismatchError, match="runs the TrainStep that was planned; received `<lambda>`"):
        subject.plan.check(lambda state, batch: state, (subject.state, subject.batch))
