"""Meshes that are searched side by side, each by one of several processes (`search_processes.py`).

Each process, this one included, takes the next mesh that nobody has taken, with the best plan so far to beat. So what
is found may differ from run to run, as it does where a search goes by the clock; with a limit of work instead of time
there is one process.
"""

import collections
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from autoshard.child_process import packed
from autoshard.cluster import LogicalMesh
from autoshard.interrupts import StopRequest
from autoshard.planner.mesh_prices import PricesOfMeshes
from autoshard.planner.overlap import StretchWeights
from autoshard.planner.program import Program
from autoshard.plans.found import Found, Incumbent, is_faster
from autoshard.plans.found_elsewhere import with_problem, without_problem
from autoshard.plans.outcome import Outcome
from autoshard.plans.question import Question, axes_of, axes_text, report
from autoshard.trace.trace import Trace

_POLL_S = 0.05
"""Between two looks at the request to stop."""

SearchMesh = Callable[[Question, LogicalMesh, StopRequest, Incumbent, StretchWeights | None, str], Found]
"""Searches a mesh: the question, the mesh, a request to stop, the best so far, weights to begin with, and the stage for
people. A function of a module, which another process finds by its name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Terms:
    """On which terms the next mesh is searched.

    Attributes:
      question: The question. incumbent, weights: As for `search_mesh`.
    """

    question: Question
    incumbent: Incumbent
    weights: StretchWeights | None


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What is asked of another process.

    Attributes:
      search: What it does. mesh: Where.
      terms: Their question lacks its program, its trace, and who hears of progress.
      has_prices: Whether what choices cost on a mesh is remembered for other questions.
    """

    search: SearchMesh
    mesh: LogicalMesh
    terms: Terms
    has_prices: bool


@dataclasses.dataclass(frozen=True, slots=True)
class OnMesh:
    """What was found on a mesh, here or by another process.

    Attributes:
      mesh: The mesh. outcome: What was found.
      found: The same with the problem of the plan, which is made anew where another process found it.
    """

    mesh: LogicalMesh
    outcome: Outcome
    found: Callable[[], Found]

    def is_faster(self, incumbent: Incumbent) -> bool:
        """Whether there is a plan that takes the place of the best."""
        best = self.outcome.best
        return best is not None and is_faster(best.step_s, best.fits, incumbent)


def are_side_by_side(question: Question, meshes: Sequence[LogicalMesh]) -> bool:
    """Whether some meshes are worth sharing out between processes, which are started by then."""
    beside = question.beside
    is_told_whole = question.start is None and question.restrict is None  # a restriction may be any function
    return len(meshes) > 1 and is_told_whole and beside is not None and beside.begin(question.program)


def searched(
    search: SearchMesh,
    terms: Callable[[], Terms | None],
    meshes: Sequence[LogicalMesh],
    stop: StopRequest,
    stage: str,
    ready: bool,
) -> Iterator[OnMesh]:
    """Searches meshes, and yields what is found on each as soon as it is.

    Args:
      search: Searches a mesh.
      terms: Asked anew before each, by several threads; None ends the search.
      meshes: The meshes. stop: Asks to end.
      stage: For people. ready: Whether there are processes that share the work (`are_side_by_side`).
    """
    if ready:
        yield from _side_by_side(search, terms, meshes, stop, stage)
        return
    for n, mesh in enumerate(meshes, 1):
        now = terms()
        if stop.requested or now is None:
            return
        name = f"{stage} {n}/{len(meshes)}"
        yield _here(mesh, search(now.question, mesh, stop, now.incumbent, now.weights, name))


def _side_by_side(
    search: SearchMesh,
    terms: Callable[[], Terms | None],
    meshes: Sequence[LogicalMesh],
    stop: StopRequest,
    stage: str,
) -> Iterator[OnMesh]:
    """`searched` by this process and those beside it."""
    first = terms()
    if first is None:
        return
    question, beside = first.question, first.question.beside
    assert beside is not None
    left = collections.deque(enumerate(meshes, 1))
    told: queue.SimpleQueue[tuple[int, LogicalMesh, Outcome | None]] = queue.SimpleQueue()

    def go_on(process: int) -> None:
        """What a thread does for its process: takes one mesh after another."""
        while (taken := _next(left, terms)) is not None:
            n, mesh, now = taken
            answer = None
            try:
                answer = beside.ask(process, packed(_request(search, mesh, now)))
            finally:  # whatever goes wrong, this process searches the mesh
                told.put((n, mesh, cast(Outcome | None, answer)))
            if answer is None:
                return

    own = _next(left, terms)  # before the others take theirs: the first is mostly the best
    threads = [threading.Thread(target=go_on, args=(n,), daemon=True) for n in range(min(beside.count, len(left)))]
    for thread in threads:
        thread.start()
    try:
        while not stop.requested:
            if own is not None:
                n, mesh, now = own
                name = f"{stage} {n}/{len(meshes)}"
                yield _here(mesh, search(now.question, mesh, stop, now.incumbent, now.weights, name))
            are_working = any(thread.is_alive() for thread in threads)
            with contextlib.suppress(queue.Empty):
                while True:
                    n, mesh, outcome = told.get(timeout=_POLL_S if are_working and not left else 0)
                    if outcome is None:  # the process is gone, for a lack of memory maybe
                        left.append((n, mesh))
                        continue
                    axes = axes_text(axes_of(mesh))
                    report(question.options, question.started, f"{stage} {n}/{len(meshes)}", f"{axes}: done beside")
                    yield _elsewhere(question, mesh, outcome)
            own = _next(left, terms)
            if own is None and not are_working:  # asked before the last was told
                return
    finally:
        left.clear()
        for n, thread in enumerate(threads):
            if thread.is_alive():  # in the midst of a search that nobody waits for
                beside.end(n)


def _next(
    left: collections.deque[tuple[int, LogicalMesh]], terms: Callable[[], Terms | None]
) -> tuple[int, LogicalMesh, Terms] | None:
    """The next mesh, taken, and its terms; None if there is none. Several threads may ask at once."""
    now = terms()
    try:
        return None if now is None else (*left.popleft(), now)
    except IndexError:
        return None


def _request(search: SearchMesh, mesh: LogicalMesh, terms: Terms) -> Request:
    question = terms.question
    options = dataclasses.replace(question.options, on_progress=None)
    bare = dataclasses.replace(
        question, program=cast(Any, None), traced=cast(Any, None), options=options, prices=None, beside=None
    )
    return Request(search, mesh, dataclasses.replace(terms, question=bare), question.prices is not None)


def answered(request: Request, program: Program, prices: PricesOfMeshes, stop: StopRequest) -> Outcome:
    """What another process does with a request about a program; `prices` are its own."""
    terms = request.terms
    question = dataclasses.replace(
        terms.question,
        program=program,
        traced=Trace(cast(Any, None), None, None, program.graph),
        prices=prices if request.has_prices else None,
    )
    return without_problem(request.search(question, request.mesh, stop, terms.incumbent, terms.weights, ""))


def _here(mesh: LogicalMesh, found: Found) -> OnMesh:
    return OnMesh(mesh, without_problem(found), lambda: found)


def _elsewhere(question: Question, mesh: LogicalMesh, outcome: Outcome) -> OnMesh:
    return OnMesh(mesh, outcome, lambda: with_problem(question, outcome))
