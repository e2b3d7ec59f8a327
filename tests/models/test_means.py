"""Which losses of the zoo are known to be plain means over examples."""

import jax
import jax.numpy as jnp
import optax
import pytest
from autoshard_models.zoo import objective_of
from zoo_programs import PROGRAMS

import autoshard
from autoshard.plans.mean_loss import why_no_mean_of


def test_means_are_those_whose_examples_neither_see_each_other_nor_weigh_differently():
    known = set()
    for family, program in PROGRAMS.items():
        own = objective_of(program.config)
        loss = lambda params, mutable, batch, key, own=own: own.loss(
            params, mutable, batch, key if own.is_random else None
        )
        step = autoshard.TrainStep(loss, optax.sgd(1.0), has_mutable=True)
        if why_no_mean_of(step, jax.eval_shape(program.functions.init, 0), program.batch()) is None:
            known.add(family)
    # masked tokens weigh differently in the others, or examples share capacities, averages or one graph
    assert known == {"gpt", "gpt_linen", "llama", "vit", "vit_linen", "unet", "dlrm", "recurrent"}


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda e: jnp.mean(e), None),
        (lambda e: jnp.sum(e) / e.size, None),
        (lambda e: jnp.sum(jnp.mean(e, 0)) + 3.0, None),
        (lambda e: jnp.sum(e * (1 / e.shape[0])), None),
        (lambda e: jax.checkpoint(lambda e: jnp.average(jnp.sum(e, 1)))(e), None),
        (lambda e: jnp.sum(e), "a sum over the examples"),
        (lambda e: jnp.sum(jnp.mean(e, 1)) / 12, "a sum over the examples"),
        (lambda e: jax.ops.segment_sum(e, jnp.zeros(e.shape[0], int), 3).mean(), "a sum over the examples"),
        (lambda e: jnp.sum(e) + 0 * e.shape[0], "a sum over the examples"),
        (lambda e: jnp.mean(e.reshape(12, 2)), "what it raises for 6, not 12 examples: TypeError"),
    ],
)
def test_a_sum_over_examples_is_no_mean(loss, why):
    """What it is divided by is told by the numbers in the program for half as many examples."""
    step = autoshard.TrainStep(
        lambda params, batch, key: (loss((batch["x"] * params) ** 2), {"mean": jnp.mean(batch["x"])}), optax.sgd(1.0)
    )
    state = jax.eval_shape(step.init, jax.ShapeDtypeStruct((2,), jnp.float32))
    found = why_no_mean_of(step, state, {"x": jax.ShapeDtypeStruct((12, 2), jnp.float32)})
    assert found is None if why is None else found is not None and found.startswith(why)
