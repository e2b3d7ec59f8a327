"""Every family: it learns, its state keeps its types, and steps planned or written by hand are plain ones.

benchmarks/zoo_equality.py runs every strategy on every mesh; here are the plan, and for each family the strategies that
say most of it. With `--exhaustive` plans are on all meshes, and strategies that other families show are run too.
"""

import jax
import numpy as np
import pytest
import zoo_checks
from autoshard_models.zoo import FAMILIES
from zoo_programs import PROGRAMS

import autoshard
from autoshard import baselines
from autoshard.plans.make import plan_program

BY_HAND = {
    "gpt": ("zero1+megatron-sp",),
    "gpt_linen": ("zero3+megatron",),
    "llama": (),
    "encoder": (),
    "encoder_decoder": (),
    "moe": ("ddp+experts", "zero3+experts+megatron"),
    "vit": ("zero2",),
    "vit_linen": (),
    "wide_resnet": ("ddp+megatron",),
    "unet": (),
    "dlrm": ("ddp+tables", "zero1"),
    "recurrent": ("ddp+megatron",),
    "graph_network": ("zero3",),
}
"""Strategies that are run in the tests: on two axes, since those of one axis split over both."""

ALSO_BY_HAND = {
    "gpt": ("ddp+tables",),
    "llama": ("zero3+megatron-sp",),
    "encoder": ("zero2+megatron",),
    "encoder_decoder": ("zero3+megatron",),
    "vit_linen": ("megatron",),
    "wide_resnet": ("zero1",),
    "unet": ("zero3",),
}
"""Strategies that are run with `--exhaustive` only: those above, and the plan of the family, have them or what they are
made of.
"""

ON_ALL_MESHES = ("dlrm",)
"""Families that are planned for one and three axes in every run; GPTs on such meshes are those of
tests/execution/test_gpt_forms.py.
"""


@pytest.fixture(scope="module", params=PROGRAMS)
def reference(request):
    """A family's program, traced and run once for all tests of it; what it compiled is dropped afterwards."""
    yield zoo_checks.reference_of(PROGRAMS[request.param])
    jax.clear_caches()


def by_name(reference):
    return next(name for name, program in PROGRAMS.items() if program is reference.program)


def test_there_is_a_program_for_every_family():
    assert list(PROGRAMS) == list(FAMILIES) == list(BY_HAND)
    assert {name for name, strategies in BY_HAND.items() if not strategies} <= set(ALSO_BY_HAND)
    for name, program in PROGRAMS.items():
        assert type(program.config) is FAMILIES[name].config


def test_loss_falls_and_types_stay(reference):
    zoo_checks.assert_learns(reference.program.functions, reference.batches[0])


def test_a_step_moves_all_mutable_state(reference):
    before = zoo_checks.numbers(reference.first.mutable)
    after = reference.trail[0]["mutable"].values()
    assert all((old != new).all() for old, new in zip(before, after, strict=True))
    assert bool(before) == (by_name(reference) == "wide_resnet")


def check_planned(reference, mesh):
    subject = reference.subject
    axes = zoo_checks.MESHES[mesh]
    made = plan_program(
        subject.traced,
        subject.program,
        subject.cluster,
        mesh=axes,
        donate_argnums=subject.donated,
        options=zoo_checks.OPTIONS,
    )
    plan = autoshard.Plan.of(made)
    zoo_checks.check_plan(plan)
    zoo_checks.assert_equal(plan, reference)


@pytest.mark.slow
def test_planned_steps_equal_plain_ones(reference):
    for mesh in zoo_checks.MESHES if by_name(reference) in ON_ALL_MESHES else ["2x4"]:
        check_planned(reference, mesh)


@pytest.mark.exhaustive
@pytest.mark.parametrize("mesh", [mesh for mesh in zoo_checks.MESHES if mesh != "2x4"])
def test_planned_steps_equal_plain_ones_on_other_meshes(reference, mesh):
    if by_name(reference) in ON_ALL_MESHES:
        pytest.skip("is planned for all meshes in every run")
    check_planned(reference, mesh)


def check_by_hand(reference, names):
    chosen = [s for s in baselines.suited(reference.subject) if s.name in names]
    assert len(chosen) == len(names)
    for strategy in chosen:
        plan = baselines.plan_baseline(
            strategy, reference.subject, mesh=zoo_checks.MESHES["2x4"], options=zoo_checks.OPTIONS
        )
        zoo_checks.assert_equal(plan, reference)


def test_steps_by_hand_equal_plain_ones(reference):
    check_by_hand(reference, BY_HAND[by_name(reference)])


@pytest.mark.exhaustive
def test_more_steps_by_hand_equal_plain_ones(reference):
    name = by_name(reference)
    if name not in ALSO_BY_HAND:
        pytest.skip("all its strategies are run in every run")
    check_by_hand(reference, ALSO_BY_HAND[name])


def test_deviations_are_shares_of_the_scale_of_a_leaf():
    """Of the leaf's largest number, 10 or 0.1; of a thousandth of the largest number among leaves of its kind."""
    expected = {".a['x']": np.float32([10, -5]), ".a['y']": np.float32([1e-4]), ".b['x']": np.float32([0.1])}
    moved = lambda path: {p: leaf + np.float32(0.001) * (p == path) for p, leaf in expected.items()}
    shares = {path: zoo_checks.deviation(moved(path), expected) for path in expected}
    assert [shares[path].leaf for path in expected] == list(expected)
    assert [s.share for s in shares.values()] == pytest.approx([1e-4, 1e-1, 1e-2], rel=1e-3)
    with pytest.raises(AssertionError):
        zoo_checks.deviation({"n": np.int32([1])}, {"n": np.int32([2])})


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_planned_decoding_equals_plain_decoding(family):
    zoo_checks.assert_small(zoo_checks.decoding_deviations(PROGRAMS[family], zoo_checks.MESHES["2x4"]))
