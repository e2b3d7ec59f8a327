"""The decision in the words of Kueue and Slurm, for those who run these."""
