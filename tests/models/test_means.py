"""Which losses of the zoo are known to be plain means over examples."""

import jax
import optax
from autoshard_models.zoo import objective_of
from zoo_programs import PROGRAMS

import autoshard
from autoshard.plans.variant_space import why_no_mean_of


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
