"""Copies of weights that are there earlier than one product before their reader, since collectives wait for each other.

XLA:GPU's latency-hiding scheduler has one collective in flight at a time, and begins each as late as hides it. Where
products are short beside what is sent, as in micro-batches, a gather whose reader comes while another collective is in
flight runs before that one, and so on: copies are there many products before they are read. The orders of the plan
bound how many (`prefetches.py`). The schedule by which the plan's step is predicted, read from its end, tells when each
must begin at the latest.
"""

from collections.abc import Sequence

import numpy as np

from autoshard.compiler.buffer_uses import BufferKind, BufferUse
from autoshard.compiler.solved import SolvedProgram
from autoshard.compiler.transfer_times import TransferTimes


def queued(solved: SolvedProgram, uses: Sequence[BufferUse], spans: np.ndarray, times: TransferTimes) -> np.ndarray:
    """The spans of all buffers, where copies of weights are there from when their gathers begin.

    A copy is not there before what reads the same last is done, nor before all that enters its reader's checkpointed
    function is there.

    Args:
      solved: The program. uses: Its buffers. spans: int64 [n, 2], when they are there.
      times: When gathers begin at the latest.
    """
    analysis, spans = solved.analysis, spans.copy()
    graph, place = analysis.graph, analysis.graph.checkpoint_of()
    for k, use in enumerate(uses):
        if use.kind is not BufferKind.OPERAND_COPY or use.start >= use.stop:
            continue
        value, reader = solved.moves[use.owner].value, graph.operations[use.stop - 1]
        if value not in analysis.weights or value not in reader.operands or not reader.rule.is_heavy:
            continue
        begin = times.begins.get((reader.equation, reader.operands.index(value)))
        if begin is None:
            continue
        consumers = (c.index for c, _ in analysis.chains.consumers[value] if c.rule.is_heavy and c.index < reader.index)
        opened = graph.checkpoints[place[reader.index]][0] if place[reader.index] != -1 else 0
        spans[k, 0] = min(spans[k, 0], max(begin, max(consumers, default=-1) + 1, opened))
    return spans
