"""Checkpoints that cannot lie: sharded states on disk and in the memory of hosts, with a checksum for every shard."""
