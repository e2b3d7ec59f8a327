"""Gives the tests eight CPU devices, no cache of solutions, quick compilation, and Ctrl-C; must run before anything
uses a JAX backend.
"""

import os
import signal
import subprocess
import sys

import jax

QUICK = "--xla_cpu_use_fusion_emitters=false"
"""A flag of XLA. Without the newer emitters, small programs compile in a third of the time or less."""


PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
"""Another. On a loaded machine, devices of one step may be far apart; XLA:CPU ends the process after 40 s."""


def _xla_knows(flag: str) -> bool:
    """Whether XLA knows `flag`; it ends a process that sets one that it does not know, so that another one tries."""
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    trial = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True)
    return trial.returncode == 0


for known in filter(_xla_knows, (QUICK, PATIENT)):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {known}".strip()

os.environ["AUTOSHARD_CACHE"] = "off"  # what earlier runs solved must not decide what a test sees

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a run that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
