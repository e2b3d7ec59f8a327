"""Runs MathOpt on one program after another in a process of its own, which its owner may kill at any moment.

Started by `mathopt_runner.py` as a script, so that it imports OR-Tools and NumPy but nothing of autoshard, and never
the owner's main module. `run` serves within the owner's process too.

Requests and answers are pickled tuples behind their length, on the standard streams. The process ends when its input
does, even in the midst of a solve, so that it does not outlive its owner.
"""

import os
import pickle
import queue
import struct
import sys
import threading
from typing import IO, Any

import numpy as np
from ortools.math_opt import model_pb2
from ortools.math_opt.python import mathopt

LENGTH = struct.Struct("<Q")
"""Comes before every message: its length in bytes."""


def run(
    model: bytes, solver_type: str, parameters: mathopt.SolveParameters, hint: tuple[np.ndarray, np.ndarray] | None
) -> tuple[str, float, float, np.ndarray, np.ndarray, int, int]:
    """Solves a serialised `ModelProto`.

    Args:
      solver_type: A name of `mathopt.SolverType`. hint: Ids and values of variables to start from.

    Returns:
      (name of the termination reason, primal and dual bound of the objective, ids and values of the best solution's
      non-zero variables (empty without one), branch-and-bound nodes, simplex iterations).
    """
    program = mathopt.Model.from_model_proto(model_pb2.ModelProto.FromString(model))
    extra = mathopt.ModelSolveParameters()
    if hint is not None:
        values = {program.get_variable(int(i)): float(v) for i, v in zip(*hint, strict=True)}
        extra.solution_hints = [mathopt.SolutionHint(variable_values=values)]
    result = mathopt.solve(program, mathopt.SolverType[solver_type], params=parameters, model_params=extra)
    ids, values = np.zeros(0, np.int64), np.zeros(0)
    if result.solutions and result.solutions[0].primal_solution is not None:
        found = result.solutions[0].primal_solution.variable_values
        ids, values = np.array([v.id for v in found], np.int64), np.array(list(found.values()), np.float64)
    bounds, stats = result.termination.objective_bounds, result.solve_stats
    return (
        result.termination.reason.name, bounds.primal_bound, bounds.dual_bound, ids, values, stats.node_count,
        stats.simplex_iterations,
    )  # fmt: skip


def send(stream: IO[bytes], message: Any) -> None:
    """Writes one message."""
    data = pickle.dumps(message, protocol=5)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Reads one message; raises EOFError at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


def _listen(source: IO[bytes], requests: queue.SimpleQueue) -> None:
    try:
        while True:
            requests.put(receive(source))
    except BaseException:  # whatever ends the stream ends the process
        os._exit(0)


def main() -> None:
    """Answers requests until the input ends: (True, `run`'s result) or (False, the text of an error)."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # HiGHS prints at times; that must not come between the answers
    requests: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(sys.stdin.buffer, requests), daemon=True).start()
    while True:
        request = requests.get()
        try:
            answer = (True, run(*request))
        except Exception as error:  # told to the owner, who decides
            answer = (False, f"{type(error).__name__}: {error}")
        send(answers, answer)


if __name__ == "__main__":
    main()
