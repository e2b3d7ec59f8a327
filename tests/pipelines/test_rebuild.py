"""The programs of a plan in stages are made again from the step, and recognised."""

import dataclasses

import jax.numpy as jnp
import pytest

from autoshard.errors import PlanMismatchError
from autoshard.pipelines.plan.rebuild import program_function


def test_each_program_is_the_planned_one(subject):
    for number, program in enumerate(subject.plan.programs):
        fn, shapes = program_function(subject.plan, subject.step, subject.state, subject.batch, number)
        assert fn.__name__ == program.name
        program.check(fn, shapes)  # raises for any other program


def test_another_step_is_noticed(subject):
    def changed(params, batch, rng):
        loss, aux = subject.step.loss_fn(params, batch, rng)
        return jnp.sqrt(loss), aux

    step = dataclasses.replace(subject.step, loss_fn=changed)
    last = len(subject.plan.programs) - 1
    with pytest.raises(PlanMismatchError):
        fn, shapes = program_function(subject.plan, step, subject.state, subject.batch, last)
        subject.plan.programs[last].check(fn, shapes)
