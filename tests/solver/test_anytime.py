"""Stopping and repeating: Ctrl-C gives the best so far, limits are kept, work limits give the same answer again."""

import dataclasses
import importlib.util
import os
import pathlib
import signal
import threading

import generate
import pytest

from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver import Progress, SolverOptions, Status, evaluate, solve
from autoshard.solver.primal_dual import PrimalDualSearch
from autoshard.solver.reduce.network import Network
from autoshard.solver.reduce.presolve import presolve
from autoshard.solver.search import Search
from autoshard.solver.warm_up import ALWAYS, SELDOM, WITHIN_CAPACITY, load_kernels


@pytest.fixture(scope="module")
def endless():
    """A problem that is not solved to the end in minutes."""
    load_kernels(ALWAYS + WITHIN_CAPACITY + SELDOM)
    return generate.grid(0, 30, 6, 0.4)


def check(problem, solution):
    result = evaluate(problem, solution.choices)
    assert result.feasible and result.objective == solution.certificate.objective
    assert solution.certificate.bound <= solution.certificate.objective
    assert solution.certificate.status is Status.FEASIBLE


def once_found(action):
    """A progress callback that acts when the first solution is there."""
    done = []

    def tell(progress: Progress) -> None:
        if progress.objective < float("inf") and not done:
            done.append(action())

    return tell


def test_ctrl_c_returns_the_best_so_far(endless):
    interrupt = once_found(lambda: signal.raise_signal(signal.SIGINT))
    solution = solve(endless, SolverOptions(relative_gap=0.0, time_limit_s=600), on_progress=interrupt)
    check(endless, solution)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_in_the_midst_of_anything(endless):
    """Whatever runs when it comes: a kernel, Python or a program in another process."""
    for delay_s in (0.7, 2.2):
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGINT))
        options = SolverOptions(relative_gap=0.0, time_limit_s=600)
        check(endless, solve(endless, options, on_progress=once_found(timer.start)))
        timer.join()


def test_a_second_ctrl_c_ends_at_once(endless):
    def twice():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        solve(endless, SolverOptions(relative_gap=0.0, time_limit_s=600), on_progress=once_found(twice))


def test_a_stop_that_the_caller_requests(endless):
    stop = StopRequest()
    ask = once_found(lambda: setattr(stop, "is_asked", True))
    check(endless, solve(endless, SolverOptions(relative_gap=0.0, time_limit_s=600), on_progress=ask, stop=stop))
    nothing = solve(endless, SolverOptions(relative_gap=0.0), stop=StopRequest(True))
    assert nothing.choices is None and nothing.certificate.status is Status.UNKNOWN


def test_handlers_of_the_program_are_left_alone():
    seen = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with stop_on_signals() as stop:
            signal.raise_signal(signal.SIGINT)
        assert seen == [signal.SIGINT] and not stop.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_limit_is_kept(endless):
    """That this returns at all is what is tested; on an idle machine it takes about 4.1 s."""
    check(endless, solve(endless, SolverOptions(relative_gap=0.0, time_limit_s=4.0)))


def test_a_solution_is_there_though_the_time_is_over(endless):
    """A busy machine may leave none for the search proper."""
    search, network = Search(endless, SolverOptions(time_limit_s=1e-9), None), Network(endless)
    presolve(network, lambda: True)
    PrimalDualSearch(search, network, None).run()
    assert search.choices is not None and evaluate(endless, search.choices).feasible


def answer(solution):
    certificate = solution.certificate
    return solution.choices, dataclasses.replace(certificate, solve_s=0.0)


@pytest.mark.parametrize("side", [6, 14])
def test_a_work_limit_gives_the_same_answer_again(side):
    problem = generate.grid(1, side, 6, 0.4)
    options = SolverOptions(relative_gap=0.0, work_limit=0.5, seed=3)
    first, second = solve(problem, options), solve(problem, options)
    assert answer(first) == answer(second)
    assert evaluate(problem, first.choices).feasible


def test_work_limits_of_many_small_problems():
    for seed in range(40):
        problem = generate.random_problem(seed)
        options = SolverOptions(relative_gap=0.0, work_limit=1.0)
        assert answer(solve(problem, options)) == answer(solve(problem, options))


def test_no_clock_is_read_but_where_it_must_be():
    """With a work limit the answer depends on nothing but the input, so only these modules may know the time."""
    folder = pathlib.Path(importlib.util.find_spec("autoshard.solver").origin).parent
    allowed = {"budget.py", "options.py", "exact/mathopt_runner.py", "least_capacity.py", "warm_up.py"}
    texts = {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*.py")}
    users = {name for name, text in texts.items() if "import time" in text}
    assert users <= allowed
