"""What processes of tests have imported when they are forked (`together`); no backend of JAX runs yet."""

import importlib
import warnings

warnings.filterwarnings("ignore", message="os.fork")  # JAX fears for threads of its own, of which there are none yet

for name in (
    "autoshard.api",
    "autoshard.checkpoints.checkpoints",
    "autoshard.cli",
    "autoshard.host_tables.hosted",
    "autoshard.train.trainer",
    "autoshard_models.zoo",
    "flax.linen",
    "flax.nnx",
    "optax",
):
    importlib.import_module(name)
