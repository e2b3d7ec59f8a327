"""A plan as a configuration of MaxText, which its trainer takes in place of `base.yml`, and which inherits from that.

The file replaces MaxText's mesh and its table of logical names: `mesh_axes`, with the sizes `ici_<axis>_parallelism`;
`data_sharding`, the mesh axes that split the dimensions of a batch; and `logical_axis_rules`, a list of [logical name,
mesh axes], whole, since what a table lacks is not split at all. The names are those of MaxText's `base.yml` (commit
000b810b, and release 0.2.5, whose own reader reads the file). A plan tells the layouts of weights and batches; what
MaxText asks for in activations follows from them, as it does in `base.yml`.
"""

import json
from collections.abc import Mapping, Sequence

from autoshard.errors import ExportError
from autoshard.execution.placement import partition_spec
from autoshard.plans.logical import Axes, LogicalAxes
from autoshard.plans.naming import logical_axes
from autoshard.plans.program_plan import PlannedTensor, ProgramPlan

MESH_AXES = {
    "data": "data",
    "stage": "pipeline",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp_transpose",
    "context": "context",
    "context_usp_ulysses": "context_usp_ulysses",
    "context_autoregressive": "context_autoregressive",
    "tensor": "tensor",
    "tensor_sequence": "tensor_sequence",
    "expert": "expert",
    "autoregressive": "autoregressive",
}
"""The mesh axes for which MaxText has an option of size, and what stands for them in its name."""

BATCH, LENGTH = "activation_batch", "activation_length"

ALIASES = {
    BATCH: (
        "activation_batch_attn",
        "activation_batch_moe",
        "activation_embed_and_logits_batch",
        "activation_kv_batch",
        "activation_prefill_kv_batch",
        "decode_batch",
    ),
    LENGTH: (
        "activation_norm_length",
        "activation_norm_length_moe",
        "activation_input_length_attn",
        "activation_length_attn",
        "activation_length_moe",
        "activation_q_length",
        "prefill_activation_length",
        "prefill_activation_norm_length",
    ),
    "heads": ("q_heads", "kv_heads"),
    "mlp": ("mlp_moe", "mlp_no_fsdp", "gdn_head"),
    "embed": ("embed_vocab", "embed_moe", "q_lora", "kv_lora"),
}
"""MaxText's names for the same dimension in other tensors; each is laid out as the first unless it is named itself."""

ACTIVATIONS = {
    "heads": ("activation_heads", "activation_kv"),
    "kv_heads": ("activation_kv_heads", "activation_kv_head_dim", "cache_heads", "paged_kv_heads"),
    "mlp": ("activation_mlp",),
    "mlp_moe": ("activation_mlp_moe",),
    "vocab": ("activation_vocab",),
    "exp": ("activation_exp",),
}
"""Names of activations by the dimension of the weight that makes them: they are split as it is, but for the axes that
already split the batch or the sequence."""


def maxtext_yaml(
    plan: ProgramPlan, names: Mapping[str, Sequence[str | None]] | None = None, nearest: bool = False
) -> str:
    """A plan as the text of a configuration of MaxText.

    Args:
      plan: The plan of a training step.
      names: MaxText's names of the parameters' dimensions by path pattern, as for `logical_axes`. Without them, the
        rules hold invented names, of which MaxText makes no use, and split nothing but batches there.
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
    rows = _completed(dict(axes.axes))
    batch, length = rows[BATCH], rows[LENGTH]
    data = [list(batch), list(length)] if length else [list(batch)]
    sizes = {MESH_AXES[name]: size for name, size in plan.axes}
    lines = [
        f"# Made by autoshard from its plan `{plan.name}` for {plan.num_devices} devices of cluster `{plan.cluster}`.",
        "# Use: python3 -m maxtext.trainers.pre_train.train <this file> run_name=... and options of the model.",
        "# Sizes are those within one slice. On several, divide one of them by their number, and set dcn_<axis>_",
        "# parallelism to that number.",
    ]
    for deviation in axes.deviations:
        pin = f"'{deviation.path}': {partition_spec(deviation.ruled)}"
        lines += [f"# DEVIATES: {deviation}; to plan as the rules say, pin {pin}"]
    lines += [
        "base_config: base.yml",
        "override_logical_axis_rules: true",
        f"mesh_axes: {_quoted([name for name, _ in plan.axes])}",
        *(f"ici_{name}_parallelism: {size}" for name, size in ({"fsdp": 1} | sizes).items()),
        f"data_sharding: {_quoted(data)}",
        "logical_axis_rules: [",
        *(f"  {_quoted([name, list(a)])}," for name, a in rows.items()),
        "]",
    ]
    return "\n".join(lines) + "\n"


def _completed(rules: dict[str, Axes]) -> dict[str, Axes]:
    """Rules for all of MaxText's names that follow from those of the plan."""
    rows: dict[str, Axes] = {BATCH: rules.get(BATCH, ()), LENGTH: rules.get(LENGTH, ())} | rules
    for name, aliases in ALIASES.items():
        if name in rows:
            rows = dict.fromkeys(aliases, rows[name]) | rows
    both = {"activation_embed_and_logits_batch_sequence": (*rows[BATCH], *rows[LENGTH])}
    used = {*rows[BATCH], *rows[LENGTH]}
    for name, activations in ACTIVATIONS.items():
        if name in rows:
            rows = dict.fromkeys(activations, tuple(axis for axis in rows[name] if axis not in used)) | rows
    return both | rows


def _quoted(value: object) -> str:
    """In the flow style of YAML, which JSON is a part of."""
    return json.dumps(value, ensure_ascii=False)
