"""A plan as a MaxText file of mesh and rules, which its option `custom_mesh_and_rule` reads.

The file holds `mesh_axes`, `data_sharding` (the mesh axes that split the dimensions of a batch) and
`logical_axis_rules`, a list of [logical name, mesh axes], as the files of MaxText's folder
`src/maxtext/configs/custom_mesh_and_rule` do (read in 2026). Sizes are not in it: MaxText takes them from its options
`ici_<axis>_parallelism` and `dcn_<axis>_parallelism`, so that the mesh axes must be ones it knows.
"""

import json
from collections.abc import Mapping, Sequence

from autoshard.errors import ExportError
from autoshard.execution.placement import partition_spec
from autoshard.plans.logical import Axes, LogicalAxes
from autoshard.plans.naming import logical_axes
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan

MESH_AXES = (
    "data",
    "stage",
    "fsdp",
    "fsdp_transpose",
    "context",
    "context_usp_ulysses",
    "context_autoregressive",
    "tensor",
    "tensor_sequence",
    "expert",
    "autoregressive",
)
"""The mesh axes for which MaxText's `base.yml` has options of size."""

BATCH, LENGTH = "activation_batch", "activation_length"
_BATCH_NAMES = (
    BATCH,
    "activation_batch_moe",
    "activation_embed_and_logits_batch",
    "activation_embed_and_logits_batch_sequence",
    "activation_prefill_kv_batch",
    "activation_kv_batch",
    "decode_batch",
)
_LENGTH_NAMES = (LENGTH, "activation_norm_length")
"""MaxText's names of the batch and of the sequence in activations."""


def maxtext_yaml(
    plan: ProgramPlan, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False
) -> str:
    """A plan as the text of a `custom_mesh_and_rule` file.

    Args:
      plan: The plan of a training step.
      names: MaxText's names of the parameters' dimensions by path pattern, as for `logical_axes`. Without them, the
        rules hold invented names, of which MaxText makes no use.
      nearest: As for `logical_axes`; what deviates is written into the file as comments.

    Raises:
      ExportError: A mesh axis that MaxText lacks; tensors of one name that are planned differently (MaxText's
        optimizer state and its batches count, since their layouts follow from the same rules); no batch.
    """
    unknown = [name for name, _ in plan.axes if name not in MESH_AXES]
    if unknown:
        raise ExportError(
            f"MaxText's mesh axes are {', '.join(MESH_AXES)}, but the plan has `{unknown[0]}`. Plan with other names, "
            "as in mesh={'data': 4, 'tensor': 2}."
        )
    batch = batch_of(plan)
    patterns = {a.name: (BATCH, LENGTH, *[None] * len(a.shape))[: len(a.shape)] for a in batch}
    axes = logical_axes(plan, {**patterns, **(names or {})}, inherit=True, nearest=nearest)
    return _text(plan, axes)


def batch_of(plan: ProgramPlan) -> tuple[PlannedTensor, ...]:
    """The arguments with dimensions that are not of the donated state: those of the other positional arguments.

    Raises:
      ExportError: There are none.
    """
    heads = list(dict.fromkeys(a.name.split(".")[0] for a in plan.arguments))
    state = {heads[i] for i in plan.donate_argnums if i < len(heads)} or set(heads[:1])
    batch = tuple(a for a in plan.arguments if a.shape and a.name.split(".")[0] not in state)
    if not batch:
        raise ExportError(
            "A MaxText file says how batches are split, but the planned function takes no argument besides its state. "
            "Plan a training step: (state, batch) -> (state, metrics)."
        )
    return batch


def _text(plan: ProgramPlan, axes: LogicalAxes) -> str:
    rules = dict(axes.axes)
    batch, length = rules.get(BATCH, ()), rules.get(LENGTH, ())
    aliases = dict.fromkeys(_BATCH_NAMES, batch) | dict.fromkeys(_LENGTH_NAMES, length)
    rows: dict[str, Axes] = aliases | {name: a for name, a in rules.items() if name not in aliases}
    data = [list(batch), list(length)] if length else [list(batch)]
    sizes = " ".join(f"<net>_{name}_parallelism={size}" for name, size in plan.axes)
    lines = [
        f"# Made by autoshard from its plan `{plan.name}` for {plan.num_devices} devices of cluster `{plan.cluster}`.",
        f"# Use: custom_mesh_and_rule=<name of this file> {sizes}",
        "# where <net> is ici within a slice or node, and dcn between them.",
    ]
    for deviation in axes.deviations:
        pin = f"'{deviation.path}': {partition_spec(deviation.ruled)}"
        lines += [f"# DEVIATES: {deviation}; to plan as the rules say, pin {pin}"]
    lines += [
        f"mesh_axes: {_quoted([name for name, _ in plan.axes])}",
        f"data_sharding: {_quoted(data)}",
        "logical_axis_rules: [",
        *(f"  {_quoted([name, list(a)])}," for name, a in rows.items()),
        "]",
    ]
    return "\n".join(lines) + "\n"


def _quoted(value: object) -> str:
    """In the flow style of YAML, which JSON is a part of."""
    return json.dumps(value, ensure_ascii=False)
