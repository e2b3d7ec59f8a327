"""Kernels of convolutions in the order of dimensions that cuDNN wants."""

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.live_range import LiveRange
from autoshard.graph.graph import Operation


def kernel_copies(chains: DefUse) -> list[LiveRange]:
    """The copies of convolution kernels that are arguments.

    cuDNN wants kernels with their input features innermost, which the program has elsewhere: a kernel that is an
    argument is transposed once, before its first convolution, and stays for the last one.
    """
    graph = chains.graph
    copies = []
    for argument in graph.arguments:
        uses = [o.index for o, _ in _readers(chains, argument.value) if o.name == "conv_general_dilated"]
        if uses and len(graph.values[argument.value].shape) > 1:
            copies.append(LiveRange(argument.value, min(uses), max(uses) + 1))
    return copies


def is_reversed_kernel(chains: DefUse, value: int) -> bool:
    """Whether a value is a reversed kernel, which a convolution for gradients reads as it is."""
    consumers = chains.consumers[value]
    return chains.made_by(value).name == "rev" and all(c.name == "conv_general_dilated" for c, _ in consumers)


def _readers(chains: DefUse, value: int) -> list[tuple[Operation, int]]:
    """Who reads a value, or the same reversed."""
    found = []
    for operation, slot in chains.consumers[value]:
        if operation.name == "rev":
            found += _readers(chains, operation.result())
        else:
            found.append((operation, slot))
    return found
