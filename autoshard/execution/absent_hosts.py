"""Tells XLA which arguments lie in the memory of the host, where JAX does not.

JAX says so of arguments and results by the memory kinds of their shardings. Devices of XLA:GPU's ahead-of-time
topologies know no memory kinds (`addressable_memories()` is empty, jax 0.10.2), and shardings on them lose theirs
without a word: the compiler would take all to be on the device. What JAX would have said is therefore written into the
lowered program: the attribute `mhlo.memory_kind` of each argument and result. Arguments that the program does not use
are not part of it; which those are, JAX tells nowhere in public (`compile_args`).
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from jax.extend.mlir import ir
from jax.sharding import NamedSharding

from autoshard.execution.placement import HOST_MEMORY

_DEVICE_MEMORY = "device"
_ATTRIBUTE = "mhlo.memory_kind"


def told_of_hosts(
    lowered: Any, shardings: Sequence[NamedSharding], arguments: Collection[int], results: Collection[int]
) -> Any:
    """A lowered program in which it is said which flat arguments and results lie in the memory of the host.

    Args:
      lowered: What `jax.jit(f).lower` returned; it is changed where JAX has not said so.
      shardings: Of all flat arguments. arguments, results: Those that lie there, by position.
    """
    if all(shardings[n].memory_kind == HOST_MEMORY for n in arguments):
        return lowered
    module = lowered.compiler_ir("stablehlo")
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])
    with module.context:
        main = next(op for op in module.body.operations if ir.StringAttr(op.attributes["sym_name"]).value == "main")
        main.attributes["arg_attrs"] = _said(main.attributes["arg_attrs"], [n in arguments for n in kept])
        outputs = range(len(ir.ArrayAttr(main.attributes["res_attrs"])))
        main.attributes["res_attrs"] = _said(main.attributes["res_attrs"], [n in results for n in outputs])
    return lowered


def _said(attributes: Any, in_host: Iterable[bool]) -> Any:
    """The attributes of arguments or results, with the memory in which each lies."""
    found = []
    for own, there in zip(ir.ArrayAttr(attributes), in_host, strict=True):
        kind = ir.StringAttr.get(HOST_MEMORY if there else _DEVICE_MEMORY)
        found.append(ir.DictAttr.get({**{a.name: a.attr for a in ir.DictAttr(own)}, _ATTRIBUTE: kind}))
    return ir.ArrayAttr.get(found)
