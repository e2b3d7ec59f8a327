"""What a plan keeps whole only because no mesh axis divides it, and what to do about it."""

import math
from collections.abc import Mapping, Sequence

from autoshard.cluster import LogicalMesh
from autoshard.graph.graph import Graph
from autoshard.planner.allowed import as_held

_LARGE_BYTES = 1e6
_LARGE_SHARE = 5e-4
"""What takes less, or a smaller share of all arguments, is not worth the padding: the positions of Whisper's sounds."""
_LARGE_SIZE = 1024
"""A shorter dimension of the state, such as the positions of a picture, is not worth the padding."""


def indivisible(graph: Graph, mesh: LogicalMesh) -> tuple[str, ...]:
    """Warnings of arguments with a dimension that the plan would want to split but cannot, one for each shape.

    These are the long dimensions of large arguments, such as a vocabulary, and the batch, of what is no state:
    its leading dimension of those that an operation which reads it can split. The steps that a scan runs over are none,
    and padding them would make another program.
    """
    axes = {axis.name: axis.size for axis in mesh.axes if axis.size > 1}
    if not axes:
        return ()
    successors = {o.successor_of for o in graph.outputs}
    total_bytes = sum(graph.values[a.value].size_bytes for a in graph.arguments)
    large_bytes = max(_LARGE_BYTES, _LARGE_SHARE * total_bytes)
    splits = _dims_that_split(graph)
    alike: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for number, argument in enumerate(graph.arguments):
        value = graph.values[argument.value]
        stuck = [i for i, d in enumerate(value.shape) if d > 1 and all(d % size for size in axes.values())]
        is_kept = value.size_bytes >= large_bytes and len(stuck) == sum(d > 1 for d in value.shape)
        is_data = number not in successors
        leading = next((i for i in range(len(value.shape)) if (argument.value, i) in splits), None)
        is_batch = is_data and leading in stuck and value.shape[leading] > min(axes.values())
        is_of_ids = is_data and value.dtype.startswith(("int", "uint"))
        if is_of_ids and leading not in stuck and _divides_all(value.shape, axes):
            continue  # tokens of which the examples split: their positions, often one more than are read, need not
        long = [
            i
            for i in stuck
            if (value.size_bytes >= large_bytes and (is_kept or value.shape[i] >= _LARGE_SIZE))
            or (is_batch and i == leading)
        ]
        if long:
            alike.setdefault((value.shape, tuple(long)), []).append(number)
    return tuple(_warning(graph, axes, long, numbers) for (_, long), numbers in alike.items())


def _dims_that_split(graph: Graph) -> set[tuple[int, int]]:
    """(argument's value, dimension) for each that an operation which reads it could split, if its size were right."""
    arguments = {a.value for a in graph.arguments}
    return {
        (value, i)
        for operation in graph.operations
        for value, dims in zip(operation.operands, operation.rule.operands, strict=True)
        if value in arguments
        for i, factors in enumerate(dims)
        if factors
    }


def _divides_all(shape: Sequence[int], axes: Mapping[str, int]) -> bool:
    """Whether all axes together can split a dimension."""
    return any(d % math.prod(axes.values()) == 0 for d in shape)


def not_held(graph: Graph, mesh: LogicalMesh) -> tuple[str, ...]:
    """Warnings of annotations of arguments that split a dimension which their axes do not divide."""
    found = []
    for argument in graph.arguments:
        shape = graph.values[argument.value].shape
        held = as_held(argument.fixed, shape, mesh) or ()
        for i, (asked, kept) in enumerate(zip(argument.fixed or (), held, strict=False)):
            if asked != kept:
                axes = ", ".join(asked or ())
                found.append(
                    f"`{argument.name}` with shape {shape} is annotated to be split over {axes} along dimension {i}, "
                    "which that does not divide: it is kept whole there, as JAX keeps it. Pad it, or change the "
                    "annotation."
                )
    return tuple(found)


def _warning(graph: Graph, axes: Mapping[str, int], dims: tuple[int, ...], numbers: list[int]) -> str:
    """The rule, the arguments of one shape that it meets, the line, and the next step."""
    first = graph.arguments[numbers[0]]
    shape = graph.values[first.value].shape
    more = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    line = next((o.source for o in graph.operations if first.value in o.operands and o.source), "")
    read = f", read at {line}," if line else ""
    sizes = " and ".join(f"{i} (size {shape[i]})" for i in dims)
    widest = max(axes.values())
    padded = " and ".join(str(-(-shape[i] // widest) * widest) for i in dims)
    mesh = ", ".join(f"{name}={size}" for name, size in axes.items())
    return (
        f"`{first.name}`{more} with shape {shape}{read} is kept whole along dimension {sizes}: a mesh axis "
        f"splits only what it divides, and none of {mesh} does. "
        f"Pad to a multiple of {widest}, such as {padded}, to have it split."
    )
