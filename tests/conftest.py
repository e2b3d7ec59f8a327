"""Gives the tests eight CPU devices, no cache of solutions, quick compilation, and Ctrl-C; must run before anything uses
a JAX backend.
"""

import mmap
import os
import pathlib
import signal

import jax
import jaxlib

QUICK = "xla_cpu_use_fusion_emitters"
"""An option of XLA. Without the newer emitters, small programs compile in a third of the time or less."""


def _xla_has(option: str) -> bool:
    """Whether XLA's library names `option`: a process that sets one that it does not know is ended."""
    for path in pathlib.Path(jaxlib.__file__).parent.glob("*jax*.so"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(option.encode()) >= 0:
                return True
    return False


if _xla_has(QUICK):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{QUICK}=false".strip()

os.environ["AUTOSHARD_CACHE"] = "off"  # what earlier runs solved must not decide what a test sees

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a run that a shell put in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

jax.config.update("jax_num_cpu_devices", 8)
