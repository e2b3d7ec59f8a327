"""A comparison holds the plan and every strategy, with figures that add up, as data, as a table and as a picture."""

import dataclasses
import functools
import json
import pathlib
import signal
import sys
import xml.etree.ElementTree as ElementTree

import jax
import jax.numpy as jnp
import optax
import pytest
from typer.testing import CliRunner

import autoshard
from autoshard.baselines import ALL, DataRule, Strategy, TensorRule
from autoshard.cli import app
from autoshard.comparison.comparison import COLUMNS, Comparison, cells, ranked, verdict
from autoshard.comparison.picture import page, write_picture
from autoshard.errors import ConfigError, MissingExtraError
from autoshard.printing import amount, seconds
from autoshard.strategies.hand_written import hand_written, in_form
from autoshard.strategies.make import prepare_subject, try_baseline

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SETTINGS = {"cluster": CONFIGS / "clusters" / "cpux8.yaml", "donate_argnums": 0}


def step(state, batch):
    """One step of momentum descent of a network of two layers."""

    def loss(params):
        return jnp.mean((jnp.tanh(batch @ params["up"]) @ params["down"] - batch) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["params"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
    return {"params": params, "momentum": momentum}, value


def shapes(batch_size=64):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {"up": f32(64, 512), "down": f32(512, 64)}
    return {"params": params, "momentum": params}, f32(batch_size, 64)


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return autoshard.compare(step, *shapes(), mesh={"data": 4, "tensor": 2}, **SETTINGS)


@pytest.fixture(scope="module")
def tight() -> Comparison:
    """A limit that the parameters and momenta of a device exceed unless they are split: 2 x 2 x 64 x 512 x 4 bytes."""
    return autoshard.compare(step, *shapes(), mesh={"data": 4, "tensor": 2}, memory_budget_bytes=4e5, **SETTINGS)


def test_all_are_there(comparison):
    applicable = [s for s in ALL if s.spread is None and s.tensor is not TensorRule.SEQUENCE]
    assert [c.name for c in comparison.contenders] == ["autoshard", *(s.name for s in applicable)]
    assert all(c.fits and not c.reason for c in comparison.contenders)
    assert (comparison.num_devices, comparison.device) == (8, "CPU-generic")
    assert comparison.limit_bytes == pytest.approx(0.9 * 8e9)


def test_contenders_are_the_plans_that_the_baselines_make(comparison):
    named = {c.name: c.plan for c in comparison.contenders}
    alone = autoshard.baselines.zero(step, *shapes(), stage=3, mesh={"data": 4, "tensor": 2}, **SETTINGS)
    assert named["zero3"].estimate == alone.estimate
    own = autoshard.plan(step, *shapes(), mesh={"data": 4, "tensor": 2}, **SETTINGS)
    assert named["autoshard"].estimate == own.estimate


def test_no_strategy_beats_the_plan_beyond_its_gap(comparison, tight):
    for found in (comparison, tight):
        for other in found.contenders[1:]:
            if other.fits:
                assert other.plan.estimate.step_s >= found.own.plan.certificate.bound * (1 - 1e-9)


def test_figures_add_up(comparison):
    for c in comparison.contenders:
        e = c.plan.estimate
        assert sum(time_s for time_s, _ in c.communication.values()) == pytest.approx(e.comm_s)
        assert sum(wire for _, wire in c.communication.values()) == pytest.approx(e.comm_bytes)
        assert sum(c.memory_bytes.values()) == pytest.approx(e.peak_bytes)
        assert comparison.relative_step(c) * comparison.own.plan.estimate.step_s == pytest.approx(e.step_s)


def test_what_does_not_fit_is_shown_with_what_it_needs(tight):
    fits = {c.name: c.fits for c in tight.contenders}
    assert fits["autoshard"] and fits["zero3"] and not fits["ddp"]
    for c in tight.contenders:
        assert (c.plan.estimate.peak_bytes <= 4e5) == c.fits == (not c.reason)
    shown = ranked(tight)
    assert shown[0] is tight.own
    keys = [(not c.fits, c.plan.estimate.step_s) for c in shown[1:]]
    assert keys == sorted(keys)
    assert tight.best_other.plan.estimate.step_s == min(c.plan.estimate.step_s for c in tight.contenders[1:] if c.fits)


def test_what_cannot_be_written_down_is_told():
    found = autoshard.compare(
        step, *shapes(12), strategies=(Strategy(DataRule.DDP),), mesh={"data": 8}, title="twelve", **SETTINGS
    )
    (own, ddp) = found.contenders
    assert own.fits and ddp.plan is None and not ddp.fits and "12" in ddp.reason
    assert found.best_other is None and "None of the strategies fits" in verdict(found)
    text = str(found)
    assert text.startswith("twelve on cluster `cpux8`") and "no plan" in text and f"ddp: {ddp.reason[:60]}" in text
    assert json.loads(found.json())["contenders"][1] == {"name": "ddp", "form": "", "fits": False, "reason": ddp.reason}


def test_nothing_fits():
    found = autoshard.compare(step, *shapes(), strategies=(), mesh={"data": 8}, memory_budget_bytes=1000, **SETTINGS)
    assert not found.own.fits and found.own.plan.estimate.peak_bytes > 1000
    assert "would do" in found.own.reason and verdict(found) == "No plan found fits the memory."


def test_ctrl_c_keeps_what_is_there():
    sent = []

    def interrupt(progress):
        if progress.stage.startswith("zero1") and not sent:
            sent.append(progress)
            signal.raise_signal(signal.SIGINT)

    strategies = [Strategy(rule) for rule in (DataRule.DDP, DataRule.ZERO1, DataRule.ZERO2)]
    options = autoshard.PlanOptions(on_progress=interrupt, cache=False)
    found = autoshard.compare(step, *shapes(), strategies=strategies, mesh={"data": 8}, options=options, **SETTINGS)
    own, ddp, _, zero2 = found.contenders
    assert sent and own.plan is not None and ddp.plan is not None
    assert zero2.plan is None and zero2.reason == "Not tried: stopped."
    assert "stopped" in str(found)
    at_once = dataclasses.replace(found, contenders=(own, zero2))
    assert "stopped before a strategy that fits was found" in verdict(at_once)


def layer(weights, x):
    """One layer of two products; recomputing what lies between takes time."""
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def loss_of_layers(params, batch):
    """The loss of four layers, each checkpointed."""
    return jnp.mean((functools.reduce(lambda x, w: jax.checkpoint(layer)(w, x), params, batch) - 1.0) ** 2)


TRAIN_STEP = autoshard.TrainStep(loss_of_layers, optax.adam(1e-3))


def layered_arguments():
    """State and batch of `TRAIN_STEP`, by shape: activations of a megabyte beside weights of 256 kB."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(TRAIN_STEP.init, [{"up": f32(64, 512), "down": f32(512, 64)}] * 4), f32(4096, 64)


@pytest.mark.parametrize(
    "budget_bytes",
    [pytest.param(1e9, marks=pytest.mark.exhaustive), pytest.param(1.3e7, marks=pytest.mark.exhaustive), 9e6],
)
def test_strategies_have_the_best_of_the_usual_forms(budget_bytes):
    """Each has the form whose plan is the fastest of those that fit, as each form planned by itself tells; and the
    plan, whose form is searched, is no slower than any, but for its gap."""
    settings = {"mesh": {"data": 8}, "memory_budget_bytes": budget_bytes, **SETTINGS}
    strategies = (Strategy(DataRule.DDP), Strategy(DataRule.ZERO3))
    asked = {"options": autoshard.PlanOptions(remat="search", micro_batches="as_written")}
    found = autoshard.compare(TRAIN_STEP, *layered_arguments(), strategies=strategies, **asked, **settings)
    forms = hand_written(TRAIN_STEP, *layered_arguments())
    assert [form.recomputed for form in forms] == ["nothing", "all but dots", "all", "as written"]
    subjects = {form.recomputed: prepare_subject(form.fn, *layered_arguments(), **settings) for form in forms}
    for strategy, contender in zip(strategies, found.contenders[1:], strict=True):
        alone = {name: try_baseline(strategy, subject, **settings) for name, subject in subjects.items()}
        fitting = {name: o.plan.estimate.step_s for name, o in alone.items() if o.fits}
        assert contender.fits == bool(fitting)
        if fitting:
            assert contender.step_s == pytest.approx(min(fitting.values()), rel=2e-3)
            assert contender.step_s == pytest.approx(fitting[contender.form], rel=2e-3)
            assert contender.step_s >= found.own.plan.certificate.bound * (1 - 1e-9)
        else:
            assert contender.plan is None or not contender.fits
    assert found.own.fits and found.own.form == str(found.own.plan.choice)


def test_forms_are_told():
    settings = {"mesh": {"data": 8}, **SETTINGS}
    found = autoshard.compare(TRAIN_STEP, *layered_arguments(), strategies=(Strategy(DataRule.ZERO3),), **settings)
    (line,) = [l for l in found.text().splitlines() if l.startswith("zero3")]
    assert line.split()[:2] == ["zero3", "nothing"] and "recomputed" in found.text().splitlines()[1]
    assert "zero3, nothing recomputed" in verdict(found)
    assert "keep for the backward pass: all in all 4 layers" in verdict(found)
    assert [c["form"] for c in json.loads(found.json())["contenders"]] == ["all in all 4 layers", "nothing"]
    assert "<th>recomputed</th>" in page(found) and "zero3, nothing recomputed" in page(found)


def test_a_strategy_in_a_form_is_named():
    assert [in_form("zero3", form) for form in ("", "all", "as written")] == [
        "zero3",
        "zero3, all recomputed",
        "zero3, as written",
    ]


def test_a_plan_whose_form_was_chosen_is_compared_alike():
    settings = {"mesh": {"data": 8}, **SETTINGS}
    plan = autoshard.plan(TRAIN_STEP, *layered_arguments(), **settings)
    strategies = (Strategy(DataRule.ZERO3),)
    found = plan.compare(TRAIN_STEP, strategies=strategies, **settings)
    alike = autoshard.compare(TRAIN_STEP, *layered_arguments(), strategies=strategies, **settings)
    shown = lambda comparison: [(c.name, c.form, c.step_s) for c in comparison.contenders]
    assert shown(found) == shown(alike) and found.contenders[1].form == "nothing"


def test_a_step_that_is_left_as_it_is_has_one_form():
    options = autoshard.PlanOptions(remat="as_written", micro_batches="as_written")
    found = autoshard.compare(
        TRAIN_STEP,
        *layered_arguments(),
        strategies=(Strategy(DataRule.ZERO3),),
        mesh={"data": 8},
        options=options,
        **SETTINGS,
    )
    assert not found.has_forms and "recomputed" not in found.text()


def test_json_holds_the_figures(comparison):
    document = json.loads(comparison.json())
    assert document["num_devices"] == 8 and document["limit_bytes"] == comparison.limit_bytes
    for row, c in zip(document["contenders"], comparison.contenders, strict=True):
        e = c.plan.estimate
        assert (row["name"], row["step_s"], row["peak_bytes"]) == (c.name, e.step_s, e.peak_bytes)
        assert row["communication"] == {k: {"time_s": s, "wire_bytes": b} for k, (s, b) in c.communication.items()}
        assert row["gap"] == c.plan.certificate.gap and row["mesh"] == c.plan.mesh_axes


def test_the_table(comparison, tight):
    for found in (comparison, tight):
        text = found.text()
        assert max(map(len, text.splitlines())) <= 118
        for c in found.contenders:
            (line,) = [l for l in text.splitlines() if l.split()[:1] == [c.name]]
            facts = (seconds(c.plan.estimate.step_s), amount(c.plan.estimate.peak_bytes), "yes" if c.fits else "no")
            assert all(fact in line for fact in facts)
        assert len(cells(found, found.own)) == len(COLUMNS)
    saved = 1 - comparison.own.plan.estimate.step_s / comparison.best_other.plan.estimate.step_s
    assert f"{saved:.1%} less time" in verdict(comparison)


def test_pictures(comparison, tight, tmp_path):
    for name in ("a.png", "b.svg", "c.html"):
        write_picture(tight, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n")
    drawing = ElementTree.parse(tmp_path / "b.svg")
    words = {"".join(e.itertext()).strip() for e in drawing.iter("{http://www.w3.org/2000/svg}text")}
    e = tight.own.plan.estimate
    assert {c.name for c in tight.contenders} | {"computation", "state", "limit 400 kB"} <= words
    assert {seconds(e.step_s), amount(e.peak_bytes)} <= words
    assert sum("does not fit" in word for word in words) >= 1
    write_picture(tight, tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    text = (tmp_path / "c.html").read_text()
    assert text.count("<tr") == 1 + len(tight.contenders) and "<svg" in text
    odd = dataclasses.replace(comparison, title="<b>&")
    assert "<h1>&lt;b&gt;&amp;</h1>" in page(odd)


def test_bars_end_at_the_step(tmp_path):
    """What hides behind kernels takes no time of its own."""
    cluster = CONFIGS / "clusters" / "h100x8.yaml"
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    wide = {"up": f32(64, 1 << 16), "down": f32(1 << 16, 64)}
    found = autoshard.compare(
        step,
        {"params": wide, "momentum": wide},
        f32(1 << 16, 64),
        strategies=[s for s in ALL if s.name in ("ddp", "zero3")],
        cluster=cluster,
        mesh={"data": 8},
        donate_argnums=0,
    )
    write_picture(found, tmp_path / "a.svg")
    drawing = ElementTree.parse(tmp_path / "a.svg")
    words = {"".join(e.itertext()).strip() for e in drawing.iter("{http://www.w3.org/2000/svg}text")}
    estimates = [c.plan.estimate for c in found.contenders]
    assert any(e.hidden_s > 0.01 * e.step_s for e in estimates)
    assert {seconds(e.step_s) for e in estimates} <= words
    for contender, e in zip(found.contenders, estimates, strict=True):
        assert sum(contender.exposed_s.values()) == pytest.approx(e.exposed_s)


def test_pictures_that_cannot_be_drawn(comparison, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"\.html, \.png, \.svg"):
        write_picture(comparison, tmp_path / "a.gif")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if it were not installed
    with pytest.raises(MissingExtraError, match=r"pip install 'autoshard\[pictures\]'"):
        write_picture(comparison, tmp_path / "a.png")
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path):
    out, picture = tmp_path / "c.json", tmp_path / "c.svg"
    small = ["model.overrides={num_layers: 1, embed_dim: 32, num_heads: 2}", "data.sequence_length=16"]
    args = [CONFIGS / "gpt_125m.yaml", *small, "--cluster", CONFIGS / "clusters" / "h100x8.yaml"]
    args += ["--only", "ddp,zero3", "--mesh", "data=8", "--json", out, "--picture", picture]
    result = CliRunner().invoke(app, ["compare", *map(str, args)])
    assert result.exit_code == 0, result.output
    document = json.loads(out.read_text())
    assert [c["name"] for c in document["contenders"]] == ["autoshard", "ddp", "zero3"]
    assert all(c["mesh"] == {"data": 8} for c in document["contenders"])
    assert "h100x8" in result.stdout and picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("args", "told"), [(["--only", "ddp,zero4"], "'zero4'"), (["--picture", "a.gif"], "ends in one of")]
)
def test_mistakes_are_found_before_the_work(args, told):
    result = CliRunner().invoke(app, ["compare", str(CONFIGS / "gpt3_175b.yaml"), *args])
    assert result.exit_code == 2 and told in result.stderr


def test_loops_run_as_often_as_is_said():
    """A comparison counts the body of a `while` loop as a plan does: 7 times."""

    def looped(state, batch):
        new, value = step(state, batch)
        body = lambda x: jnp.tanh(x @ state["params"]["up"] @ state["params"]["down"])
        return new, value + jnp.sum(jax.lax.fori_loop(0, jnp.int32(value) + 1, lambda _, x: body(x), batch))

    compute_s = []
    for trips in (1, 7):
        options = autoshard.PlanOptions(while_trips=trips)
        compared = autoshard.compare(looped, *shapes(), strategies=ALL[:1], options=options, **SETTINGS)
        planned = autoshard.plan(looped, *shapes(), options=options, **SETTINGS)
        own = compared.own
        assert own.plan is not None
        assert own.plan.estimate.compute_s == pytest.approx(planned.estimate.compute_s)
        compute_s.append(own.plan.estimate.compute_s)
    assert compute_s[1] > 1.2 * compute_s[0]
