"""Plans that experts write by hand are found: where a model has the shape that made them famous, from shapes alone.

They were found for programs in which all that is sent is waited for.
"""

import dataclasses
import pathlib

import jax
from autoshard_models import dlrm, llama, moe, optimizers, presets, train_step, wide_resnet
from autoshard_models.zoo import FAMILIES

import autoshard
from autoshard.compiler.schedule import Schedule

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"


def planned(family, config, batch_size, cluster, mesh, optimizer):
    """The plan of a training step, and the entries of each argument by its path; the last axis lies inside nodes."""
    functions = train_step.build(config, optimizer)
    state = jax.eval_shape(functions.init, 0)
    batch = FAMILIES[family].batch_shapes(config, batch_size)
    options = autoshard.PlanOptions(cache=False, schedule=Schedule.LEAST_MEMORY, device_order="listed")
    described = autoshard.Cluster.from_file(CLUSTERS / f"{cluster}.yaml")
    plan = autoshard.plan(functions.step, state, batch, cluster=described, mesh=mesh, donate_argnums=0, options=options)
    return plan, {a.name: a.entries for a in plan.arguments}


def sent(plan, *, line=None, kind=None):
    """The collectives whose line holds `line`, of one kind."""
    items = plan.estimate.communication
    return [c for c in items if (line is None or line in c.source) and kind in (None, c.kind)]


def test_many_experts_are_spread_and_tokens_travel_to_them():
    config = dataclasses.replace(moe.PRESETS["10b"], num_layers=1)
    plan, entries = planned("moe", config, 256, "h100x16", {"data": 16}, optimizers.adamw())
    for weight in ("up", "down"):
        assert entries[f"state.params.blocks.0.experts.{weight}"][0] == ("data",), "each device has its own experts"
    assert entries["batch.inputs"][0] == ("data",), "and its own tokens"
    assert sent(plan, line="Experts.__call__", kind="all-to-all")
    expert_bytes = config.num_experts * config.embed_dim * config.hidden_dim * 4
    assert not any(c.wire_bytes >= expert_bytes / 16 for c in sent(plan, line="Experts", kind="all-gather"))


def test_a_large_table_is_split_by_rows_and_a_small_one_is_not():
    """Sixty-four devices and sixteen columns: columns do not go round."""
    tables = dlrm.padded(20_000_000), dlrm.padded(10_000_000), 100
    config = dataclasses.replace(dlrm.PRESETS["criteo"], table_rows=tables, embed_dim=16)
    plan, entries = planned("dlrm", config, 65_536, "h100x64", {"data": 64}, optimizers.sgd())
    layouts = [entries[f"state.params.tables.{n}.embedding"] for n in range(3)]
    assert layouts == [(("data",), ()), (("data",), ()), ((), ())]
    assert not any(c.wire_bytes > 65_536 * 16 * 4 * 2 for c in sent(plan, line="dlrm.py:88")), "rows travel, not tables"


def test_convolutions_are_split_by_batch_early_and_by_channel_late():
    """Wide channels and four images a device: late kernels outweigh the images that pass through them. The first of the
    last block, the smallest, stays whole: the statistics of what it makes are summed in one collective."""
    config = dataclasses.replace(wide_resnet.PRESETS["250m"], base_channels=512, blocks_per_stage=(1, 1, 1, 1))
    _, entries = planned("wide_resnet", config, 64, "h100x16", {"data": 2, "tensor": 8}, optimizers.sgd())
    assert entries["batch.images"][0] == ("data", "tensor")
    kernel = lambda block, name: entries[f"state.params.blocks.{block}.{name}.conv.kernel"]
    names = ("reduce", "mix", "expand", "shortcut")
    assert not any(any(kernel(block, name)) for block in (0, 1) for name in names), "these run on a part of the batch"
    assert [any(kernel(3, name)) for name in names] == [False, True, True, True], "split by channel"
    assert {axes for name in names for axes in kernel(3, name)[:2]} == {()}, "never over the window"


def test_long_sequences_are_split():
    """Two sequences on sixteen devices: eight devices share one, and the weights of the MLP are there whole."""
    config = dataclasses.replace(llama.PRESETS["8b"], num_layers=1, context_length=131_072, attention_chunks=8)
    plan, entries = planned("llama", config, 2, "h100x16", {"data": 2, "tensor": 8}, optimizers.adamw())
    assert entries["batch.targets"] == (("data",), ("tensor",))
    hidden_bytes = config.hidden_dim * config.context_length * 2 / 8  # of one device's part of a sequence
    assert not any(c.wire_bytes > hidden_bytes for c in sent(plan, line="GatedMLP", kind="all-reduce"))
    assert sent(plan, line="attention", kind="all-to-all"), "heads for positions, around the attention"


def test_a_large_vocabulary_is_split_and_its_logits_stay_where_they_are():
    config = dataclasses.replace(presets.PRESETS["125m"], num_layers=1, vocab_size=256_000)
    plan, entries = planned("gpt", config, 16, "h100x16", {"data": 4, "tensor": 4}, optimizers.adamw())
    assert entries["state.params.token_embed.embedding"][0] == ("data", "tensor")
    per_token_bytes = 16 * config.context_length * 4
    of_loss = sent(plan, line="losses.py")
    assert of_loss, "a softmax needs a maximum and a sum of each token"
    assert all(c.wire_bytes <= 2 * per_token_bytes for c in of_loss), "and no more"
    logits_bytes = per_token_bytes * config.vocab_size / 16
    assert not any(c.wire_bytes >= logits_bytes / 2 for c in plan.estimate.communication)
