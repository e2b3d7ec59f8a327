"""One of two processes that share a batch out and measure each other; prints what each saw, the same in both.

python watched_process.py COORDINATOR NUMBER
"""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import autoshard
from autoshard.train.device_times import DeviceTimes

STEPS, EXAMPLES, WIDTH = 11, 16, 8
LONG_STEPS, LONG_S, SHORT_S = 4, 1e3, 1e-3


def main() -> None:
    """Compiles by arrays, and takes some steps."""
    jax.config.update("jax_num_cpu_devices", 1)
    jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))

    def loss_fn(params, batch, rng):
        return jnp.mean((batch @ params - 1.0) ** 2), {}

    step = autoshard.UnevenStep(autoshard.TrainStep(loss_fn, optax.sgd(0.1)), replicas=2, num_parts=8)

    def init(seed):
        return step.step.init(jax.random.normal(jax.random.key(seed), (WIDTH,)))

    batch = np.random.default_rng(0).standard_normal((EXAMPLES, WIDTH)).astype(np.float32)
    pins = {"counts": jax.P("data")}  # so that no process has all of it
    plan = autoshard.plan(step, jax.eval_shape(init, 0), batch, step.even, donate_argnums=0, pins=pins)
    run = plan.jit(step)
    state = plan.init(init, 0, run=run)
    run.compile(state, batch, step.even)
    times, told, losses = DeviceTimes(run.mesh, lambda: [1.0] * 2, lambda: np.ones(2)), [], []
    for number, counts in enumerate([step.even, step.shares([1.0, 3.0])] * (STEPS // 2) + [step.even]):
        state, metrics = run(state, batch, counts)
        losses.append(float(metrics["loss"]))
        measured = times.after_step(LONG_S if number < LONG_STEPS else SHORT_S)
        told.append([[*one.times_s.tolist(), one.step_s] for one in measured])
    alone, expected = init(0), []
    for _ in range(STEPS):
        alone, metrics = jax.jit(step.alone(EXAMPLES))(alone, batch)
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
