"""Gives the tests eight CPU devices; must run before anything uses a JAX backend."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
