"""Plain Flax language models that know nothing of autoshard: the programs that autoshard's examples and tests plan.

The package is installed as `autoshard_models`.
"""
