"""One of several processes for test_planned_processes.py: its number, how many, and the coordinator's port.

Each plans the same step for the devices of all, another than the first in another mode; all run as the first planned.
"""

import os
import sys
import traceback

import jax
import numpy as np
from test_planning import CLUSTER, batches, on_one_device, one_node, planned, program_of

import autoshard

DEVICES = 2


def main(number: int, count: int, port: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, number)
    step, make_state, _ = program = program_of()
    _, losses = on_one_device(step, make_state, batches(3))
    options = autoshard.TableOptions(mode="sync" if number else "pipelined")
    num_devices = DEVICES * count
    plan = planned(program, one_node(CLUSTER, num_devices), tables=options, mesh={"data": num_devices})
    with plan.host_tables(step, make_state) as tables:
        assert tables.execution.mode == "pipelined"
        found = [float(done.metrics["loss"]) for done in tables.steps(batches(3))]
    np.testing.assert_allclose(found, losses, rtol=1e-5)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # an orderly end would wait for the others
