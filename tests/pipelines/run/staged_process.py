"""What each of several processes runs in the tests of staged steps.

Arguments: the coordinator's address, the number of the process, the number of devices of every process (as 2,1,1),
what happens to the last process after two steps (`killed`, `stopped`), and `timeout_s`. Each line that it prints is one
thing found out.
"""

import dataclasses
import os
import signal
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from autoshard import PlanOptions, StagedPlan
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup
from autoshard.errors import PlanMismatchError, TransferError
from autoshard.pipelines.cost.stage_meshes import stage_meshes
from autoshard.pipelines.plan.make import plan_staged
from autoshard.pipelines.run.agreement import check_same_plan
from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.arrangement import Arrangement, Pipeline, Stage, Submesh
from autoshard.pipelines.search.options import StageOptions
from autoshard.train_step import TrainStep

ADDRESS, NUMBER, WHAT = sys.argv[1], int(sys.argv[2]), sys.argv[4]
DEVICES = [int(n) for n in sys.argv[3].split(",")]
WORDS, WIDTH, LENGTH = 16, 8, 4


def loss_fn(params, mutable, batch, rng):
    """A language model of residual layers with dropout, tied embeddings, and a running mean of its activations."""
    x = params["embedding"][batch["words"]]
    for n in range(2):
        layer = params[f"layer{n}"]
        kept = jax.random.bernoulli(jax.random.fold_in(rng, n), 0.9, x.shape)
        x = x + jnp.where(kept, jnp.tanh(x @ layer["up"]) @ layer["down"], 0)
    mean = 0.9 * mutable["mean"] + 0.1 * x.mean((0, 1))
    scores = x @ params["embedding"].T
    nll = optax.softmax_cross_entropy_with_integer_labels(scores, batch["next"])
    right = (scores.argmax(-1) == batch["next"]).mean(dtype=jnp.float32)
    return nll.mean(), ({"mean": mean}, {"right": right})


def training():
    """(step, state, batch) on the host."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(1e-2))
    step = TrainStep(loss_fn, optimizer, has_mutable=True)
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) / 2).astype(np.float32)
    layers = {f"layer{n}": {"up": draw(WIDTH, 2 * WIDTH), "down": draw(2 * WIDTH, WIDTH)} for n in range(2)}
    params = {"embedding": draw(WORDS, WIDTH), "unread": draw(3), **layers}
    state = step.init(params, jax.random.key(1), {"mean": np.zeros(WIDTH, np.float32)})
    words = rng.integers(0, WORDS, (2, 5, LENGTH), dtype=np.int32)
    return step, state, {"words": words[0], "next": words[1]}


def cluster(fast, slow):
    """Two slices."""
    link = Link(1e-5, 1e9, 0, "made up")
    kind = lambda name, flops: DeviceType(name, (("float32", flops),), 10**9, 1e10, 1e-6, "made up")
    own = lambda name, flops, n: NodeGroup(name, kind(name, flops), 1, n, link)
    return Cluster("mixed", (own("fast", 2e9, fast), own("slow", 1e9, slow)), dataclasses.replace(link, level=1))


def planned(step, state, batch):
    """One example on the second fast device; four through two stages, the second on all slow devices, or on the last.

    Where a process is to be killed, the one before it has no part in the plan.
    """
    hardware = cluster(2, sum(DEVICES) - 2)
    options = [(k, m) for k, part in enumerate(hardware.slices()) for m in stage_meshes(part, part.num_devices)]
    submesh = lambda part, first, n: Submesh(
        part, first, next(i for i, (k, m) in enumerate(options) if (k, m.num_devices) == (part, n))
    )
    slow = submesh(1, 1, 1) if WHAT == "killed" else submesh(1, 0, sum(DEVICES) - 2)
    both = (submesh(0, 0, 1), slow)
    arrangement = Arrangement(
        (
            Pipeline(both, (Stage(0, 2), Stage(2, 5)), 2, 2, ScheduleKind.ONE_F_ONE_B),
            Pipeline((submesh(0, 1, 1),), (Stage(0, 5),), 1, 1, ScheduleKind.ONE_F_ONE_B),
        )
    )
    return plan_staged(step, state, batch, hardware, PlanOptions(cache=False), StageOptions(), arrangement=arrangement)


def mean_of_pipelines(step, plan, state, batch):
    """The mutable state after a step: it passes from micro-batch to micro-batch; of pipelines it is the mean."""
    first, number, found = 0, 0, 0
    for pipeline in plan.arrangement.pipelines:
        mutable = state.mutable
        for _ in range(pipeline.num_micro_batches):
            part = jax.tree.map(lambda x, a=first, n=pipeline.micro_batch_size: x[a : a + n], batch)
            key = step.part_key(step.key(state), number, len(plan.parts))
            _, (mutable, _) = step.objective(state.params, mutable, part, key)
            first, number = first + pipeline.micro_batch_size, number + 1
        found += mutable["mean"] * pipeline.num_examples / plan.batch_size
    return {"mean": found}


def equal(found, expected, what):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        assert isinstance(x, jax.Array), (path, x)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        for shard in x.addressable_shards:
            name = f"{what}{jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(shard.data, np.asarray(y)[shard.index], 2e-4, 2e-5, err_msg=name)


def expected_steps():
    """(state, metrics) after each of two steps on one device; made first, so that nobody is late in between."""
    reference, after, found = jax.jit(step.in_parts(plan.parts)), state, []
    for _ in range(2):
        mutable = mean_of_pipelines(step, plan, after, batch)
        after, metrics = reference(after, batch)
        after = after.replace(mutable=mutable)
        found.append((after, metrics))
    return found


def agree():
    """Two steps equal those on one device; what all processes return is arrays, and metrics can be read."""
    global state
    for expected, expected_metrics in expected_steps():
        state, metrics = run(state, batch)
        run.wait(state)
        equal(state, expected, "state")
        assert sorted(metrics) == ["loss", "right"]
        for name, value in expected_metrics.items():
            np.testing.assert_allclose(float(metrics[name]), float(value), 1e-4)
    timeline = run.timeline
    assert len(timeline.events) == 2 * (2 * 2 + 1), timeline.events  # of all processes: two phases of each micro-batch
    assert [submesh.most_in_flight for submesh in timeline.submeshes] == [2, 1, 1]
    print("steps agree")


def quarrel():
    """Processes with different plans are told so."""
    other = dataclasses.replace(plan, owners=tuple(reversed(plan.owners))) if NUMBER == 1 else plan
    try:
        check_same_plan(other)
    except PlanMismatchError as error:
        assert "that of process 1 differs" in str(error)
        print("plans differ")


def interrupted(sign):
    """In the next step the last process sends itself a signal amid its moves; the others are told."""
    move, left = run.mover.move, 20

    def move_or_stop(*args, **options):
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), sign)
        return move(*args, **options)

    if NUMBER == len(DEVICES) - 1:
        run.mover.move = move_or_stop
    begin_s = time.monotonic()
    try:
        run(state, batch)
    except TransferError as error:
        print(f"after {time.monotonic() - begin_s:.1f} s:", error)
    try:
        run(state, batch)
    except TransferError as error:
        print("again:", error)


jax.config.update("jax_num_cpu_devices", DEVICES[NUMBER])
jax.distributed.initialize(ADDRESS, len(DEVICES), NUMBER, heartbeat_timeout_seconds=1000)
step, state, batch = training()
plan = StagedPlan.of_first(planned(step, state, batch) if NUMBER == 0 else None)
run = plan.jit(step, timeout_s=float(sys.argv[5]), coordinator_address=ADDRESS, record=True)
quarrel()
agree()
sys.stdout.flush()
interrupted(signal.SIGKILL if WHAT == "killed" else signal.SIGSTOP)
print("over", flush=True)
signal.pause()  # whoever started the processes ends them; JAX would end the others with the first one
