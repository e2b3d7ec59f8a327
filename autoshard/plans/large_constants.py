"""What a program holds beside its arguments: arrays that the function closes over, which no plan splits or counts."""

from autoshard.cluster import DeviceType
from autoshard.graph.graph import Graph, ValueKind
from autoshard.printing import amount

_WORTH_A_WARNING = 0.01
"""Of a device's memory."""


def large_constants(graph: Graph, device: DeviceType) -> tuple[str, ...]:
    """A warning if constants take much of a device's memory; every device holds all of them."""
    constants = [v for v in graph.values if v.kind is ValueKind.CONSTANT]
    size_bytes = sum(v.size_bytes for v in constants)
    if size_bytes <= _WORTH_A_WARNING * device.memory_bytes:
        return ()
    largest = max(constants, key=lambda v: v.size_bytes)
    line = next((o.source for o in graph.operations if largest.index in o.operands and o.source), "")
    read = f", read at {line}" if line else ""
    return (
        f"{len(constants)} arrays that the function closes over take {amount(size_bytes)} on every device, which "
        f"the memory of the plan does not count; the largest is {largest.dtype} {largest.shape}{read}. Pass them as "
        "arguments, or compute them inside the function.",
    )
