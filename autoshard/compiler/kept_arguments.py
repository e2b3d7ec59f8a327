"""What XLA:GPU stores beside a complementary error function: its argument.

The gradient of the exact GELU needs both, the function and the exponential of its squared argument, which is cheap to
compute again. Yet the kernel that makes the function stores it, too, as long as it fits the L2 cache, from which XLA
takes reading to cost next to nothing (`PriorityFusion` compares times). Read off programs for H100 with 12 to 67 MB a
layer: in 2 bytes it is stored up to 50 MiB, and not above; in 4 bytes it is not, nor is what an error function or a
hyperbolic tangent is made of. Under the latency-hiding schedule 8 of 10 layers did not store it: the orders of products
keep their biases from being added by their own kernels (`GemmRewriter`), and a kernel that adds one computes the rest.
"""

import dataclasses

import numpy as np

from autoshard.compiler.analysis import ProgramAnalysis
from autoshard.compiler.buffer_uses import BufferUse

_L2_BYTES = 50 * 2**20
"""Of an H100: NVIDIA, H100 Tensor Core GPU Architecture white paper, 50 MB, as its driver reports it
(`l2_cache_bytes` in autoshard/cluster/catalogue.yaml)."""


def with_kept_argument(use: BufferUse) -> BufferUse:
    """The buffer of a value of `keeping_arguments`, with the argument, which is there as long."""
    kept_bytes = np.where(use.size_bytes <= _L2_BYTES, use.size_bytes, 0.0)
    return dataclasses.replace(use, size_bytes=use.size_bytes + kept_bytes)


def keeping_arguments(analysis: ProgramAnalysis) -> frozenset[int]:
    """The complementary error functions whose arguments are stored too, where they are small enough: those that are
    stored themselves, have 2 bytes an element, and whose argument another operation reads."""
    graph, chains, stored = analysis.graph, analysis.chains, analysis.live.stored
    return frozenset(
        value
        for operation in graph.operations
        if operation.name == "erfc"
        for value, argument in [(operation.results[0], operation.operands[0])]
        if value in stored and argument is not None and argument not in stored
        if graph.values[value].itemsize_bytes == 2 and len(chains.consumers[argument]) > 1
    )
