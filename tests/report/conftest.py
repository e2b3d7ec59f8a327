"""What pages are about: a GPT planned without a solver, a plan in stages, a run; and a browser, where there is one."""

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from autoshard_models import train_step
from autoshard_models.presets import preset

import autoshard
from autoshard import Plan, StagedPlan
from autoshard.cluster import Cluster
from autoshard.compiler.schedule import Schedule
from autoshard.launch.events import (
    EventLog,
    Finished,
    GenerationStarted,
    PhaseStarted,
    SupervisorStarted,
    WorkerEntry,
    WorkerLost,
)
from autoshard.launch.messages import Phase
from autoshard.pipelines.plan.make import plan_staged
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.options import StageOptions
from autoshard.planner.build import formulate
from autoshard.planner.program import prepare
from autoshard.plans.make import Origin, plan_of_choices
from autoshard.plans.program_plan import MeshCandidate
from autoshard.solver.problem import CapacityPrice, Certificate, Status
from autoshard.trace.trace import trace

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "microsoft-edge")


def _gpt(num_layers: int) -> Plan:
    """A GPT on 16 H100, every tensor split as its last choice has it: much is sent, some of it hidden."""
    cluster = Cluster.from_file(CLUSTERS / "h100x16.yaml")
    config = preset("tiny", num_layers=num_layers, embed_dim=256, num_heads=4, context_length=64)
    functions = train_step.build(config, train_step.adamw())
    args = (jax.eval_shape(functions.init, 0), train_step.batch_shapes(batch_size=32, sequence_length=64))
    traced = trace(functions.step, args, (0,))
    mesh = cluster.slices()[0].logical_mesh({"data": 4, "tensor": 4})
    pins = [None] * len(traced.graph.arguments)
    f = formulate(prepare(traced.graph), mesh, 4e9, pins, schedule=Schedule.LATENCY_HIDING)
    picks = tuple(int(np.flatnonzero(np.isfinite(node.costs))[-1]) for node in f.problem.nodes)
    return Plan.of(
        plan_of_choices(
            traced,
            f,
            picks,
            origin=Origin("spread", cluster.name, (0,)),
            certificate=Certificate(Status.FEASIBLE, 0.1, 0.05, 0.5, 1.0, CapacityPrice(0.05, 1e-11)),
            budget_bytes=4e9,
            candidates=(
                MeshCandidate((("data", 4), ("tensor", 4)), 0.1, 0.05, "feasible"),
                MeshCandidate((("data", 16),), 0.12, 0.06, "feasible"),
            ),
            warnings=("Something with <b>markup</b> and `code`.",),
        )
    )


@pytest.fixture(scope="session")
def gpt() -> Plan:
    """Of four layers."""
    return _gpt(4)


@pytest.fixture(scope="session")
def staged() -> StagedPlan:
    """Two pipelines on two kinds of devices, one of them in two stages."""
    layers, width, batch_size = 4, 16, 6

    def loss_fn(params, batch, rng):
        h = batch["x"]
        for name in sorted(params):
            h = jax.nn.relu(h @ params[name]["kernel"])
        return jnp.mean((h - batch["y"]) ** 2), {}

    step = autoshard.TrainStep(loss_fn, optax.sgd(0.1))
    state = jax.eval_shape(
        lambda: step.init({f"layer{n}": {"kernel": jnp.zeros((width, width))} for n in range(layers)})
    )
    batch = {k: jax.ShapeDtypeStruct((batch_size, width), jnp.float32) for k in "xy"}
    first = Pipeline((Submesh(0, 0, 0), Submesh(1, 0, 0)), (Stage(0, 3), Stage(3, 4)), 2, 2, ScheduleKind.ONE_F_ONE_B)
    second = Pipeline((Submesh(0, 1, 0),), (Stage(0, 4),), 2, 1, ScheduleKind.GPIPE)
    options = autoshard.PlanOptions(cache=False)
    cluster = Cluster.from_file(CLUSTERS / "v100x8_p100x8.yaml")
    arrangement = Arrangement((first, second))
    return StagedPlan.of(plan_staged(step, state, batch, cluster, options, StageOptions(), arrangement=arrangement))


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory, gpt) -> pathlib.Path:
    """A run of two generations, of which the first lost a worker after 20 steps."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    folder.mkdir()
    lines = [
        {"kind": "train", "step": n, "generation": 1 + (n > 20), "loss": 5 / n, "items_per_s": 1e4, "item": "tokens",
         "step_time_s": 0.1, "compiled": n in (1, 21)}
        for n in range(1, 41)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    log = EventLog(folder)
    entries = tuple(WorkerEntry(rank=n, pid=n, slot=n, host="here") for n in range(2))
    log.write(
        SupervisorStarted(time=100, generation=0, pid=1, engine="local", least_workers=1, most_workers=2, resumed=False)
    )
    for generation, start in ((1, 101), (2, 131)):
        log.write(GenerationStarted(time=start, generation=generation, workers=entries[: 3 - generation], why="start"))
        for after, phase in ((0, Phase.STARTUP), (3, Phase.COMPILE), (8, Phase.TRAINING)):
            log.write(PhaseStarted(time=start + after, generation=generation, phase=phase, step=20 * (generation - 1)))
        if generation == 1:
            lost = {"rank": 1, "pid": 1, "slot": 1, "cause": "signal 9", "phase": Phase.TRAINING, "step": 20}
            log.write(WorkerLost(time=130, generation=1, **lost))
    log.write(Finished(time=160, generation=2, step=40, loss=0.125))
    gpt.save(folder / "plan.json")
    return folder


@pytest.fixture(scope="session")
def hosted() -> autoshard.HostTablesPlan:
    """A look-up in a table of a terabyte, whose rows come from host memory, and one in a table that stays."""
    array = jax.ShapeDtypeStruct
    ids, wanted = array((4096,), jnp.int32), array((4096,), jnp.float32)

    def loss_fn(params, batch, _):
        rows = jnp.concatenate([params["users"][batch["user"]], params["items"][batch["item"]]], -1)
        return jnp.mean(((rows @ params["kernel"])[:, 0] - batch["wanted"]) ** 2), None

    step = autoshard.TrainStep(loss_fn, optax.adagrad(0.1))
    params = {"users": array((10**9, 128), jnp.float32), "items": array((500, 128), jnp.float32)}
    state = jax.eval_shape(step.init, params | {"kernel": array((256, 1), jnp.float32)})
    made = autoshard.plan(
        step,
        state,
        {"user": ids, "item": ids, "wanted": wanted},
        cluster=CLUSTERS / "h100x8_cpu.yaml",
        mesh={"data": 8},
        options=autoshard.PlanOptions(cache=False),
    )
    assert isinstance(made, autoshard.HostTablesPlan)
    return made


@pytest.fixture(scope="session")
def browser() -> Iterator:
    """Chromium, from `AUTOSHARD_BROWSER` or the PATH; tests that need it are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pages are not tried in a browser")
    path = os.environ.get("AUTOSHARD_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip("no browser: set AUTOSHARD_BROWSER to a Chromium, or install one, to try pages in it")
    with playwright.sync_playwright() as running:
        started = running.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture(scope="session")
def pages(tmp_path_factory, gpt, staged, run_folder, hosted) -> Callable[[str], pathlib.Path]:
    """(`gpt`, `staged`, `run` or `hosted`) -> the file of a page about it."""
    folder = tmp_path_factory.mktemp("pages")
    subjects = {"gpt": gpt, "staged": staged, "run": run_folder, "hosted": hosted}

    def page(name: str) -> pathlib.Path:
        path = folder / f"{name}.html"
        if not path.exists():
            autoshard.write_report(subjects[name], path)
        return path

    return page
