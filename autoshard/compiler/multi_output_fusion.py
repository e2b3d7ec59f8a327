"""Values that one kernel makes together, earlier or later than the program does (XLA:GPU, `MultiOutputFusion`)."""

from collections.abc import Mapping, Set

from autoshard.compiler.def_use import DefUse
from autoshard.compiler.fusion import Fusion

_NEAR = 4
"""How many heavy kernels apart operations may be that become one kernel although others wait for the first."""


def made_together(chains: DefUse, fusion: Fusion, gradients: Set[int], root: Mapping[int, int]) -> dict[int, int]:
    """For each value that one kernel makes together with others, the operation at which it does, if not its own.

    Kernels that read one value and do not wait for each other become one kernel of several results
    (`MultiOutputFusion`), which holds all it reads and all it makes. The gradients of a gated layer's two branches are
    made together, as soon as what they are made of is there; those of the first layer, too, which only weight gradients
    read. What only these read is not waited for: the activation of a layer that is computed again in the backward pass
    is made together with its gradient; but with its hyperbolic tangent, which is there as soon as it can be, if that is
    stored. A sum that reads the same as what is made behind it is a result of that kernel, too: the gradient of
    a parameter that scales scores. That is said only of what is made of one buffer as large: of gradients that are
    added XLA has fewer buffers than are counted, since it scatters into the sum of all.

    Args:
      chains: The graph. fusion: What is stored. gradients: Gradients of weights.
      root: For values that lie in the memory of another, which that is.
    """
    values, region, fused, sources = chains.graph.values, chains.region, fusion.fused, fusion.sources
    stored = [v for v in sources if not fused[v] and values[v].shape]
    alike = lambda value: [s for s in sources[value] if values[s].shape == values[value].shape]
    moved: dict[int, int] = {}
    first: dict[int, int] = {}  # for each source, when the latest kernel that makes what is waited for runs
    unwaited: dict[int, int] = {}  # the same of kernels that make what only weight gradients read
    waited = lambda value: (
        value in chains.outputs
        or not all([r is None or r in gradients for c, _ in chains.consumers[value] for r in c.results])
    )

    def join(value: int, kernels: dict[int, int]) -> None:
        """Has a value made with an earlier one of the same source, if what it is made of is there; notes its kernel."""
        own = chains.made_by(value).index
        there = max(map(chains.defined_at, sources[value]), default=own)
        for s in alike(value):
            at = kernels.get(s, -1)
            if there < at and chains.loop_nest[at] == chains.loop_nest[own] and region[own] - region[at] <= _NEAR:
                moved[value] = min(at, moved.get(value, own))
        kernels.update(dict.fromkeys(alike(value), moved.get(value, own)))

    for value in stored:
        if waited(value) and value not in gradients:
            join(value, first)
    reductions = _reductions(chains, fusion)
    for value in stored:
        own = chains.made_by(value).index
        there = max(map(chains.defined_at, sources[value]), default=own)
        if value not in moved and value not in gradients and len({root.get(s, s) for s in alike(value)}) == 1:
            near = [at for s in alike(value) for at in reductions.get(s, ()) if region[at] == region[own]]
            beside = [at for at in near if there < at < own and chains.loop_nest[at] == chains.loop_nest[own]]
            if beside:
                moved[value] = max(beside)
    for value in stored:
        own = chains.made_by(value).index
        if waited(value) or not chains.consumers[value] or not fusion.fetched.isdisjoint(sources[value]):
            continue
        at = max((first.get(s, 0) for s in alike(value)), default=0)
        if at > own and chains.loop_nest[at] == chains.loop_nest[own]:
            moved[value] = at
        else:
            join(value, unwaited)
    return moved


def _reductions(chains: DefUse, fusion: Fusion) -> dict[int, list[int]]:
    """For each stored value, the reductions that read it, or read what is computed of it, element by element."""
    values, found = chains.graph.values, dict[int, list[int]]()
    for operation in chains.graph.operations:
        if operation.name.startswith("reduce_") and operation.operands[0] is not None:
            operand = operation.operands[0]
            read = fusion.sources[operand] if fusion.fused[operand] and operand in fusion.sources else (operand,)
            for source in read:
                if values[source].shape == values[operand].shape:
                    found.setdefault(source, []).append(operation.index)
    return found


def delayed_products(chains: DefUse, together: Mapping[int, int]) -> dict[int, int]:
    """When products run, by operation, that run later than where the program does them: right behind the kernel that
    makes what they read together with other values.

    Args:
      chains: The graph. together: What `made_together` found.
    """
    when: dict[int, int] = {}
    last = len(chains.graph.operations) - 1
    for value, at in together.items():
        for operation, _ in chains.consumers[value]:
            if operation.rule.is_heavy and operation.index < at:
                when[operation.index] = max(min(at + 1, last), when.get(operation.index, 0))
    return dict(sorted(when.items()))
