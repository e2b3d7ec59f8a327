"""The roles of arguments and groups, against what the names in the programs say."""

import jax
import jax.numpy as jnp
import pytest
from autoshard_models.encoder_decoder import EncoderDecoderConfig
from autoshard_models.moe import MoEConfig
from autoshard_models.optimizers import adafactor, adamw
from autoshard_models.train_step import build
from autoshard_models.zoo import FAMILIES
from baseline_programs import gpt, mlp

from autoshard.errors import LayoutError
from autoshard.planner.program import prepare
from autoshard.planner.roles import roles_of
from autoshard.trace.trace import trace

ADAFACTOR = adafactor(min_dim_size_to_factor=8)


def read(step):
    program = prepare(trace(step.fn, step.shapes(), (0,)).graph)
    return program, roles_of(program)


def names(program, indices):
    return {program.graph.arguments[i].name for i in indices}


def tensors(program, part):
    graph = program.graph
    return {a.name for a in graph.arguments if part in a.name and graph.values[a.value].shape}


def test_mlp():
    program, roles = read(mlp())
    assert names(program, roles.batch_arguments) == {"batch.x", "batch.y"}
    assert names(program, roles.parameters) == {f"state.params.{n}" for n in ("in", "in_bias", "out", "out_bias")}
    assert names(program, roles.optimizer_state) == {
        f"state.momentum.{n}" for n in ("in", "in_bias", "out", "out_bias")
    }
    assert names(program, roles.matrix_parameters) == {"state.params.in", "state.params.out"}
    assert len(roles.gradient_groups) == 4
    assert not roles.gradient_groups & roles.update_groups


@pytest.mark.parametrize("kind", ["plain", "tied", "dropout", "scan"])
def test_gpt(kind):
    program, roles = read(gpt(kind))
    graph = program.graph
    assert names(program, roles.batch_arguments) == {"batch.inputs", "batch.targets"}
    assert names(program, roles.parameters) == tensors(program, ".params.")
    assert names(program, roles.optimizer_state) == tensors(program, ".opt_state.")
    kernels = {n for n in tensors(program, ".params.") if n.endswith(("kernel", "embedding"))}
    assert names(program, roles.matrix_parameters) == kernels
    by_name = {a.name: dims for a, dims in zip(graph.arguments, roles.token_dims, strict=True)}
    assert by_name["batch.inputs"] == {0, 1}
    assert all(not by_name[n] for n in kernels)


@pytest.mark.parametrize("kind", ["plain", "dropout", "scan"])
def test_every_group_over_tokens_has_the_batch(kind):
    """The batch appears wherever activations do: in every product that is neither weights alone nor the update."""
    program, roles = read(gpt(kind))
    for group in program.groups:
        operation = program.graph.operations[group.operations[0]]
        if operation.name == "dot_general":
            assert roles.batch_factors[group.index], operation
        assert all(group.factors[f].size == 16 for f in roles.batch_factors[group.index])
        assert roles.batch_factors[group.index].isdisjoint(roles.sequence_factors[group.index])


@pytest.mark.parametrize("family", ["wide_resnet", "dlrm", "graph_network", "moe", "encoder_decoder"])
def test_families(family):
    """Images, clicks, graphs; norms whose update is welded to activations; factored moments."""
    family = FAMILIES[family]
    config = family.presets["tiny"]
    functions = build(config, ADAFACTOR if family.config in (MoEConfig, EncoderDecoderConfig) else adamw())
    state, batch = jax.eval_shape(functions.init, 0), family.batch_shapes(config, 8)
    program = prepare(trace(functions.step, (state, batch), (0,)).graph)
    roles = roles_of(program)
    assert names(program, roles.batch_arguments) == tensors(program, "batch.") == {f"batch.{name}" for name in batch}
    assert names(program, roles.parameters) == tensors(program, ".params.")
    assert names(program, roles.optimizer_state) == tensors(program, ".opt_state.") | tensors(program, ".mutable.")
    looked_up_by_distance = {"state.params.encoder_bias.table.embedding", "state.params.decoder_bias.table.embedding"}
    ends = ("kernel", "embedding", "experts.up", "experts.down")
    matrices = {name for name in tensors(program, ".params.") if name.endswith(ends)} - looked_up_by_distance
    assert names(program, roles.matrix_parameters) >= matrices
    vectors = {a.name for a in program.graph.arguments if len(program.graph.values[a.value].shape) < 2}
    assert not names(program, roles.matrix_parameters) & vectors
    welded = {name for name in names(program, roles.welded_state) if not name.endswith(("scale", "mean", "var"))}
    assert not welded


def test_batch_argnums_tells_the_batch_of_a_function_without_state():
    def predict(params, x):
        return jnp.tanh(x @ params["w"])

    args = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32)}, jax.ShapeDtypeStruct((16, 8), jnp.float32)
    program = prepare(trace(predict, args, ()).graph)
    with pytest.raises(LayoutError, match="batch_argnums"):
        roles_of(program)
    roles = roles_of(program, (1,))
    assert names(program, roles.batch_arguments) == {"x"}
    assert names(program, roles.parameters) == names(program, roles.matrix_parameters) == {"params.w"}


def test_a_statistic_that_only_the_update_reads_is_optimizer_state():
    """Adafactor's row means: a reduction over the gradient, which is not pointwise."""

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(state["w"])
        rows = 0.9 * state["rows"] + 0.1 * jnp.mean(gradient**2, axis=1)
        return {"w": state["w"] - gradient / jnp.sqrt(rows)[:, None], "rows": rows}

    shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.float32)
    program = prepare(trace(step, ({"w": shape(8, 4), "rows": shape(8)}, shape(16, 8)), (0,)).graph)
    roles = roles_of(program)
    assert names(program, roles.optimizer_state) == {"state.rows"}
    assert names(program, roles.parameters) == {"state.w"}
    assert len(roles.gradient_groups) == 1
