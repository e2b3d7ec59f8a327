"""Where programs are handed to MathOpt: here for small ones, otherwise in a process that can be killed.

HiGHS cannot be interrupted, and it looks at its own time limit only between steps that may be long. A large program
therefore runs in a child process (`mathopt_process.py`), started when first needed and kept for the next program; it is
killed when it overruns, or when the search is asked to stop.
"""

import contextlib
import dataclasses
import os
import queue
import subprocess
import sys
import threading
import time

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

from autoshard.errors import SolverError
from autoshard.interrupts import StopRequest
from autoshard.solver.budget import CompileTime
from autoshard.solver.exact import mathopt_process

IN_PROCESS_ENTRIES = 3_000
"""Programs of at most this many matrix entries run in this process while there is no other: they take milliseconds,
and a child takes half a second to start."""
GRACE_S = 0.5
"""What a program may overrun its own limit by, and"""
GRACE_SHARE = 0.25
"""what it may overrun it by as a share of it, whichever is more; never past the whole search's deadline plus"""
LAST_GRACE_S = 0.2
POLL_S = 0.02
"""Between two looks at the request to stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What became of a program.

    Attributes:
      reason: Name of `mathopt.TerminationReason`; "KILLED" if it was killed, which tells nothing.
      primal_bound, dual_bound: Of the program's objective.
      ids, values: Non-zero variables of the best solution; empty without one.
      nodes, iterations: Branch-and-bound nodes and simplex iterations done.
    """

    reason: str
    primal_bound: float
    dual_bound: float
    ids: np.ndarray
    values: np.ndarray
    nodes: int
    iterations: int


KILLED = Answer("KILLED", np.inf, -np.inf, np.zeros(0, np.int64), np.zeros(0), 0, 0)


class MathOptRunner:
    """Runs programs; a context manager that ends the child process with itself.

    Attributes:
      stop: Ends a running program when it is requested.
      deadline: Value of `time.perf_counter` by which everything has to end; +inf for none.
      compiling: By what was compiled since then, the deadline is later.
    """

    def __init__(self, stop: StopRequest, deadline: float = np.inf, compiling: CompileTime | None = None) -> None:
        self.stop, self.deadline, self.compiling = stop, deadline, compiling or CompileTime()
        self._child: subprocess.Popen | None = None

    def __enter__(self) -> "MathOptRunner":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end()

    def run(
        self,
        model: model_pb2.ModelProto,
        solver_type: mathopt.SolverType,
        parameters: mathopt.SolveParameters,
        hint: tuple[np.ndarray, np.ndarray] | None,
    ) -> Answer:
        """Solves `model`.

        Args:
          parameters: Its `time_limit`, if any, is also what decides when a child is killed.
          hint: Ids and values of variables to start from.

        Raises:
          SolverError: if MathOpt refuses the program.
        """
        request = (model.SerializeToString(), solver_type.name, parameters, hint)
        entries = len(model.linear_constraint_matrix.coefficients)
        if self._child is None and entries <= IN_PROCESS_ENTRIES:
            return Answer(*mathopt_process.run(*request))
        give_up = self.deadline + self.compiling.total_s + LAST_GRACE_S
        if parameters.time_limit is not None:
            limit_s = parameters.time_limit.total_seconds()
            give_up = min(give_up, time.perf_counter() + limit_s + max(GRACE_S, GRACE_SHARE * limit_s))
        answers: queue.SimpleQueue = queue.SimpleQueue()
        child = self._started()
        threading.Thread(target=_exchange, args=(child, request, answers), daemon=True).start()
        while not self.stop.requested and time.perf_counter() < give_up:
            try:
                is_good, answer = answers.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if is_good:
                return Answer(*answer)
            self._end()
            if answer is None:  # the process died, of a lack of memory for example: this program is given up
                return KILLED
            raise SolverError(f"OR-Tools refused an integer program of {entries} entries: {answer}. Report this.")
        self._end()
        return KILLED

    def _started(self) -> subprocess.Popen:
        if self._child is None or self._child.poll() is not None:
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
            self._child = subprocess.Popen(
                [sys.executable, "-P", mathopt_process.__file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for the owner alone
            )
        return self._child

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for stream in filter(None, (self._child.stdout, self._child.stdin)):
                with contextlib.suppress(OSError):  # what was still to be written has no reader
                    stream.close()
            self._child = None


def _exchange(child: subprocess.Popen, request: tuple, answers: queue.SimpleQueue) -> None:
    """Sends the request and passes the answer on; (False, None) if the child is gone."""
    assert child.stdin is not None and child.stdout is not None
    try:
        mathopt_process.send(child.stdin, request)
        answers.put(mathopt_process.receive(child.stdout))
    except (OSError, EOFError, ValueError):
        answers.put((False, None))
