"""Plain Flax models that know nothing of autoshard: the programs that autoshard's examples and tests plan.

One module a family; `zoo.py` lists them, `train_step.py` trains them, `inference.py` generates text with some of them.

The package is installed as `autoshard_models`.
"""
