"""The worker's side of a supervised run: `autoshard.elastic.run` and the `Worker` that a training loop talks to."""
