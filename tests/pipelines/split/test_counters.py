"""What a micro-batch adds to the counters of a model, as it is told and as it runs."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from autoshard.pipelines.split.counters import added_to_mutable
from autoshard.pipelines.split.forward import trace_forward
from autoshard.train_step import TrainStep


class Block(nnx.Module):
    """A layer that draws random numbers by a counter of its own."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear, self.dropout = nnx.Linear(4, 4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.linear(x))


class Model(nnx.Module):
    """The same block twice in every pass, as it is, under `remat`, or stacked and scanned."""

    def __init__(self, form: str, rngs: nnx.Rngs):
        self.form = form
        stacked = nnx.split_rngs(splits=2)(nnx.vmap(lambda rngs: Block(rngs)))
        self.block = stacked(rngs) if form == "scanned" else Block(rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        run = lambda block, x: block(x)
        match self.form:
            case "scanned":
                return nnx.scan(run, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(self.block, x)
            case "remat":
                return nnx.remat(run)(self.block, nnx.remat(run)(self.block, x))
            case _:
                return run(self.block, run(self.block, x))


@pytest.mark.parametrize("form", ["plain", "remat", "scanned"])
def test_counters_of_flax_are_known(form):
    step = TrainStep(lambda model, batch: jnp.mean(model(batch) ** 2), optax.sgd(0.1))
    state, batch = step.init(Model(form, nnx.Rngs(0, dropout=1))), jnp.ones((2, 4))
    forward = trace_forward(step, state, batch, 2)
    after = step(state, batch)[0].mutable
    ran = [
        0 if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else int(jnp.ravel(y - x)[0])
        for x, y in zip(*map(jax.tree.leaves, (state.mutable, after)), strict=True)
    ]
    assert list(added_to_mutable(forward)) == ran
    assert dict(zip(forward.mutable.names, ran, strict=True)) == {
        "block.dropout.rngs.count": 1 if form == "scanned" else 2,
        "block.dropout.rngs.key": 0,
    }


def test_what_is_no_counter_is_none():
    """Doubled, turned round, chosen, counted from another leaf, a sum of numbers that are not whole; and carried."""

    def loss(params, mutable, batch):
        new = {
            "doubled": mutable["doubled"] * 2,
            "turned": 1 - mutable["turned"],
            "chosen": jnp.where(batch.sum() > 0, mutable["chosen"] + 1, mutable["chosen"]),
            "other": mutable["doubled"] + 1,
            "average": mutable["average"] + 1.0,
            "carried": jax.lax.fori_loop(0, 3, lambda _, n: n - 2, mutable["carried"]),
            "kept": mutable["kept"],
        }
        return jnp.mean(batch * params), (new, {})

    step = TrainStep(loss, optax.sgd(0.1), has_mutable=True)
    names = ("doubled", "turned", "chosen", "other", "carried", "kept")
    state = step.init(jnp.ones(2), None, {n: jnp.int32(0) for n in names} | {"average": jnp.float32(0)})
    forward = trace_forward(step, state, jnp.ones((2, 2)), 2)
    found = dict(zip(forward.mutable.names, added_to_mutable(forward), strict=True))
    assert {name: added for name, added in found.items() if added is not None} == {"carried": -6, "kept": 0}
