"""What a plan in stages says, word for word, with times that are given, so that every figure can be checked by hand."""

import dataclasses

import pytest

from autoshard.pipelines.plan.equal_pipelines import crossing, equal_pipelines, weights_of
from autoshard.pipelines.plan.explain import explain
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan, StageCertificate
from autoshard.pipelines.schedule.durations import StageDurations, TransferDurations
from autoshard.pipelines.search.alternative import Alternative
from autoshard.plans.explain import MORE


@pytest.fixture(scope="module")
def plan(subject) -> PipelinePlan:
    """The plan, with a forward task of 1 ms in the first stage and 2 ms in the others, backward tasks twice that."""
    stage = lambda forward_ms: StageDurations(forward_ms / 1e3, 2 * forward_ms / 1e3, 0.0, 100.0, 0.0, 5e6, 1e6)
    of_two, of_one = subject.plan.durations.pipelines
    of_two = dataclasses.replace(
        of_two,
        stages=(stage(1), stage(2)),
        transfers=(TransferDurations(0, 1, 5e-4, 5e-4),),
        weights_s=(1e-3, 0.0),
        gradients_s=(0.0, 1e-3),
        update_s=(2e-3, 1e-3),
    )
    of_one = dataclasses.replace(of_one, stages=(stage(2),), weights_s=(0.0,), gradients_s=(0.0,), update_s=(1e-3,))
    return dataclasses.replace(
        subject.plan,
        durations=dataclasses.replace(subject.plan.durations, pipelines=(of_two, of_one)),
        certificate=StageCertificate(searched_s=0.02, bound_s=0.015, gap=0.25, search_s=1.5),
        considered=(
            Alternative("slow alone", None, "does not fit the memory"),
            Alternative("fast alone: 2 x 1 stage", 0.03),
            Alternative("a replica group on each slice: shares by speed", 0.02),
        ),
        warnings=("Watch out.",),
    )


def test_the_whole_account(plan):
    """By hand: the first forward task starts at 1 ms, when the weights are there. Stage 1 begins at 1 + 1 + 0.5 ms and
    runs F B F B without a pause for 2 (2 + 4) = 12 ms; 0.5 + 2 ms later the first stage is done with its last backward
    task: at 17 ms. The gradients of stage 1 are added at 14.5 + 1, before that; the longest update takes 2 ms. The
    submeshes compute for 6 + 2, 12 + 1 and 6 + 1 ms of these 19. A device holds 5 MB, and 1 MB while a task runs.
    """
    head, _, programs = explain(plan, full=True).partition("Program 0")
    assert head == HEAD
    lines = programs.splitlines()
    assert lines[0].startswith(
        " (1 x): layers 0-2: layer0 (1) .. layer1, a micro-batch of 2, 1 x CPU-generic as data=1"
    )
    assert "params.layer0.kernel  1  16x16  (-, -)" in programs
    assert lines[-1] == "warning: Watch out."


HEAD = """\
Plan in stages for cluster `mixed`: 2 x CPU-generic, 1 x CPU-slow
  step     19 ms predicted = 17 ms pipelines + 2 ms updates
  idle     50.9% of the step, on average of 3 submeshes
  memory   6 MB per device of 7.2 GB allowed where it is fullest, on fast[0]
  proof    by the costs of single layers, which the search compares: 20 ms, and no arrangement
           in its space below 15 ms (gap 25.0%), found in 1.5 s
  figures  as stated in the catalogue or the cluster file, not calibrated

Slices of the cluster, and what they take of the 6 examples of a step
slice  devices          used   limit  examples
fast   2 x CPU-generic     2  7.2 GB  6 (100%), with other slices
slow   1 x CPU-slow        1  7.2 GB  4 (67%), with other slices

What was considered, by the costs of single layers
 step  vs plan  arrangement
20 ms   1.00 x  a replica group on each slice: shares by speed
30 ms   1.50 x  fast alone: 2 x 1 stage
    -        -  slow alone: does not fit the memory

Pipeline 0: 4 examples as 2 x 2, 1f1b
stage  layers                     submesh  mesh    forward  backward  memory   limit  in flight  idle
    0  0-2: layer0 (1) .. layer1  fast[0]  data=1     1 ms      2 ms    6 MB  7.2 GB          2   58%
    1  3: layer3                  slow[0]  data=1     2 ms      4 ms    6 MB  7.2 GB          1   32%

Pipeline 1: 2 examples as 1 x 2, gpipe
stage  layers                     submesh  mesh    forward  backward  memory   limit  in flight  idle
    0  0-3: layer0 (1) .. layer3  fast[1]  data=1     2 ms      4 ms    6 MB  7.2 GB          1   63%

What crosses the boundaries between stages, for each micro-batch
pipeline  stages   sent      in  sent back      in  made by
0         0 -> 1  128 B  500 µs      128 B  500 µs  layer1

Weights: what each submesh owns, what it reads as copies, and how long copies and gradients are on their way
pipeline  submesh    owned   copies  weights in  gradients in  update
0               0  1.15 kB  2.05 kB        1 ms             0    2 ms
0               1  1.02 kB    128 B           0          1 ms    1 ms
1               0  2.18 kB  2.18 kB           0             0    1 ms

"""


def test_one_screen_is_the_beginning_of_the_account(plan):
    screen = explain(plan)
    own = HEAD[: HEAD.index("What crosses the boundaries")]
    assert screen == f"{own}warning: Watch out.\n{MORE}\n"


def test_lines_fit_a_terminal(plan):
    assert max(map(len, (explain(plan) + explain(plan, full=True)).splitlines())) <= 118


def test_a_given_arrangement_has_no_proof(subject):
    assert "none: the arrangement was given" in explain(subject.plan)


def test_pipelines_that_are_alike_are_told_once(subject):
    """A second pipeline of one stage, on another device, says nothing new."""
    plan = subject.plan
    twice = dataclasses.replace(
        plan,
        arrangement=dataclasses.replace(
            plan.arrangement, pipelines=(*plan.arrangement.pipelines, plan.arrangement.pipelines[1])
        ),
        meshes=(*plan.meshes, (dataclasses.replace(plan.meshes[1][0], name="fast[7]"),)),
        program_of=(*plan.program_of, plan.program_of[1]),
    )
    assert [group.name for group in equal_pipelines(twice)] == ["Pipeline 0", "Pipelines 1-2"]


def test_bytes_between_stages_and_of_weights_are_those_of_the_model(subject):
    """Activations of 16 float32 for each of 2 examples; four layers of 16 x 16 weights and 16 biases."""
    plan = subject.plan
    sent = crossing(plan.layers, plan.pipeline(0), 0, 1)
    assert (sent.forward_bytes, sent.backward_bytes) == (2 * 16 * 4, 2 * 16 * 4)
    layer = (16 * 16 + 16) * 4
    held = weights_of(plan)
    assert sum(w.owned_bytes for w in held.values()) == 4 * layer
    read = {(0, 0): 3 * layer, (0, 1): layer, (1, 0): 4 * layer}
    for submesh, size in read.items():
        assert size - layer * 4 <= held[submesh].copied_bytes <= size
    assert sum(w.owned_bytes + w.copied_bytes for w in held.values()) == sum(read.values())
