"""Gives the tests eight CPU devices and no cache of solutions; must run before anything uses a JAX backend."""

import os

import jax

os.environ["AUTOSHARD_CACHE"] = "off"  # what earlier runs solved must not decide what a test sees

jax.config.update("jax_num_cpu_devices", 8)
