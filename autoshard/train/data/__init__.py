"""What models are trained on: batches that (seed, step) alone determine, for every kind of example.

A run that stops and resumes at step n therefore sees the batches that it would have seen without stopping, any number
of processes sees the same, and no state of the pipeline has to be kept. Each process reads its own examples only.
"""

from autoshard.train.data.batches import Batches, TrainData

__all__ = ["Batches", "TrainData"]
