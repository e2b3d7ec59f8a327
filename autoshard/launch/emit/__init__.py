"""Job files for Slurm and Kubernetes, which start and restart a run's workers themselves, without our supervisor."""
