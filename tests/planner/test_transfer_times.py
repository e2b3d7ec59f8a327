"""When what hides is sent: as early as possible for sums of gradients, when the link has time for gathers."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.cost.exposure import Hideable, exposure
from autoshard.graph.layout import WHOLE
from autoshard.planner.estimate import CommunicationItem
from autoshard.planner.sent import sent_after, sent_parts
from autoshard.planner.timeline import Sending, Timeline
from autoshard.planner.transfer_times import earliest_ends, latest_spans, queued_begins


def timeline(kernels_s: list[float], hideable: list[Hideable]) -> Timeline:
    """A timeline of kernels and of what hides behind them alone."""
    found = exposure(kernels_s, hideable, 1.0)
    return Timeline((), (), tuple(kernels_s), 1.0, tuple(hideable), found.stretches, (), (), found)


def test_one_collective_runs_first_or_last_in_its_window():
    """One second beside kernels 0 to 3, a second each: done before 1 at the earliest, begun beside 3 at the latest."""
    planned = timeline([1.0] * 5, [Hideable(0, 4, 1.0)])
    assert earliest_ends(planned) == [1]
    assert latest_spans(planned) == [(3, 4)]


def test_two_collectives_make_room_for_each_other():
    """Both are needed by 4, and take 1.5 s: backwards, one is sent beside 3 and half of 2, the other from 1 on."""
    planned = timeline([1.0] * 5, [Hideable(0, 4, 1.5), Hideable(0, 4, 1.5)])
    assert sorted(latest_spans(planned)) == [(1, 3), (2, 4)]
    assert sorted(earliest_ends(planned)) == [2, 3]


def test_what_does_not_hide_begins_when_it_can_and_ends_when_it_must():
    planned = timeline([1.0, 1.0, 1.0], [Hideable(0, 2, 5.0)])
    assert (latest_spans(planned), earliest_ends(planned)) == ([(0, 2)], [2])


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_mirrored_schedule_lets_kernels_wait_as_long(stop):
    """Waiting is the same both ways: the formula is symmetric (`cost/exposure.py`)."""
    kernels_s, hideable = [0.5, 1.0, 0.25, 2.0], [Hideable(0, stop, 1.6), Hideable(1, 4, 2.5), Hideable(0, 1, 0.7)]
    mirrored = [dataclasses.replace(c, start=4 - c.stop, stop=4 - c.start) for c in hideable]
    one, other = exposure(kernels_s, hideable, 1.0), exposure(kernels_s[::-1], mirrored, 1.0)
    assert one.total_s == pytest.approx(other.total_s)


def gather(value, parts, times_s):
    """A gather that hides, and what it is about; `parts`: its readers by their numbers in what hides."""
    about = Sending(value, (0, WHOLE), (WHOLE, WHOLE), tuple(parts.values()), tuple(parts))
    return CommunicationItem("all-gather", ("data",), "w", (64, 64), "", 0.0, times_s, 1.0, hidden_s=times_s), about


def narrowed(formulated, mesh_of):
    """A graph of three products in turn, and one with a weight that is turned around for it: (graph, the weight, what
    turns it, the last product)."""

    def fn(x, w):
        return x @ x @ x @ x @ w.T

    f = formulated(fn, (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2, mesh_of(2))
    graph = f.program.graph
    turns, last = (next(o for o in graph.operations[::-1] if o.name == name) for name in ("transpose", "dot_general"))
    assert turns.operands == (graph.arguments[1].value,) and turns.results[0] in last.operands
    assert [o.name for o in graph.operations].count("dot_general") == 4
    return graph, graph.arguments[1].value, turns, last


@pytest.mark.parametrize("is_sent_on", [True, False])
def test_what_is_gathered_once_more_is_there_first(formulated, mesh_of, is_sent_on):
    """Three kernels of a second. A weight is gathered over one axis (1 s), turned around, and gathered over another
    (0.5 s) for the last product: that from 2.5 to 3 s, and the first one before it, from 1.5 on. Where one has nothing
    to do with the other, the longer one has the last second, and the other the half before that."""
    graph, weight, turns, last = narrowed(formulated, mesh_of)
    kernels_s = [1.0 if o.name == "dot_general" else 0.0 for o in graph.operations]
    kernels = [k for k, kernel_s in enumerate(kernels_s) if kernel_s]
    hideable = (Hideable(0, turns.index if is_sent_on else last.index, 1.0), Hideable(0, last.index, 0.5))
    second = turns.results[0] if is_sent_on else graph.arguments[0].value
    items, sendings = zip(gather(weight, {0: hideable[0].stop}, 1.0), gather(second, {1: last.index}, 0.5), strict=True)
    planned = dataclasses.replace(timeline(kernels_s, list(hideable)), communication=items, sendings=sendings)
    sent = sent_parts(planned)
    assert sent_after(graph, planned, sent) == [(), (0,) if is_sent_on else ()]
    begins = queued_begins(graph, planned)
    assert begins == ({0: kernels[1], 1: kernels[2]} if is_sent_on else {0: kernels[2], 1: kernels[1]})
