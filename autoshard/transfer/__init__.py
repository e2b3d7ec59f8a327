"""Moves arrays between meshes that differ in devices, their number, layout or process (cross-mesh resharding).

In: an array and a target sharding; in a run of several processes, the same calls in each. Out: the array in that
sharding, every tile sent once and only to devices that lack it, over `jax.device_put` within a process and JAX's
transfer server between processes; a peer that died or stalled is named in a `TransferError`.
"""
