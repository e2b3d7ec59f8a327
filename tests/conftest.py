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


def _xla_knows(flag: str) -> bool:
    """Whether XLA knows `flag`; it ends a process that sets one that it does not know, so that another one tries."""
    environment = {**os.environ, "XLA_FLAGS": flag, "JAX_PLATFORMS": "cpu"}
    trial = subprocess.run([sys.executable, "-c", "import jax; jax.devices()"], env=environment, capture_output=True)
    return trial.returncode == 0


if _xla_knows(QUICK):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()

os.environ["AUTOSHARD_CACHE"] = "off"  # what earlier runs solved must not decide what a test sees

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a run that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
