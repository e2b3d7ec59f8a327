"""Where workers run: on this machine, or on a Ray cluster. Slurm and Kubernetes are told by files that are emitted."""
