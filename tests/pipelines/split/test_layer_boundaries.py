"""Where models are cut into layers."""

import jax
import jax.numpy as jnp
import optax
import pytest
from autoshard_models.zoo import FAMILIES

from autoshard.pipelines.split.forward import Forward, trace_forward
from autoshard.pipelines.split.layer_boundaries import LayerBoundaries, find_layers
from autoshard.pipelines.split.stage_program import StageSplitter
from autoshard.train_step import TrainStep

WIDTH = 64
KEY = jax.random.key(0)
ROWS = jax.ShapeDtypeStruct((32, WIDTH), jnp.float32)


def traced(loss, params, batch=ROWS, mutable=None) -> Forward:
    step = TrainStep(loss, optax.sgd(0.1), has_mutable=mutable is not None)
    state = jax.eval_shape(lambda p, m: step.init(p, jax.random.key(0), m), params, mutable)
    return trace_forward(step, state, batch, 32)


def weights(names: str) -> dict[str, jax.ShapeDtypeStruct]:
    return dict.fromkeys(names, jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32))


def parameters(forward: Forward, cuts: LayerBoundaries) -> list[list[str]]:
    """Those that each layer reads."""
    stages = StageSplitter(forward, cuts)
    read = lambda layer: stages.program(layer, layer + 1).interface.params
    return [[forward.params.names[n] for n in read(layer)] for layer in range(cuts.num_layers)]


def sent(forward: Forward, cuts: LayerBoundaries) -> list[int]:
    """How many values each layer but the first takes from earlier ones."""
    stages = StageSplitter(forward, cuts)
    return [len(stages.program(layer, layer + 1).interface.inputs) for layer in range(1, cuts.num_layers)]


@pytest.mark.parametrize(
    ("family", "num_layers"),
    [
        ("gpt", 10),  # embedding, attention and MLP of 4 blocks, head with the loss
        ("gpt_linen", 10),  # likewise
        ("llama", 8),  # of 2 blocks the attention is cut in front of its output, where its heads' values alone live
        ("encoder", 7),  # two embeddings, attention and MLP of 2 blocks, pooler and heads
        ("encoder_decoder", 12),  # embeddings; 2 x 2 layers of the encoder; 2 x 3 of the decoder, the output
        ("moe", 6),  # attention and experts of 2 blocks
        ("vit", 6),  # patches, attention and MLP of 2 blocks, head
        ("vit_linen", 6),
        ("wide_resnet", 4),  # stem, 2 blocks, head: nothing inside a block is smaller than its ends
        ("unet", 13),  # the two products of the time embedding; blocks and attentions on both sides; head
        ("dlrm", 6),  # products of two MLPs, with the tables' layer between them
        ("recurrent", 6),  # recurrence and MLP of 2 blocks
        ("graph_network", 6),  # encoder of nodes (two products), of edges with half a round, rounds, decoder
    ],
)
def test_layers_of_the_models(family, num_layers):
    own = FAMILIES[family]
    config = own.presets["tiny"]
    objective = own.objective(config)
    loss = lambda p, m, b, k: objective.loss(p, m, b, k if objective.is_random else None)
    forward = traced(loss, *(lambda p, m: (p, own.batch_shapes(config, 32), m))(*jax.eval_shape(objective.init, KEY)))
    cuts = find_layers(forward)
    assert cuts.num_layers == num_layers and cuts.warning is None
    assert list(cuts.starts) == sorted(set(cuts.starts)) and cuts.stop == len(forward.main)


def test_without_residuals_every_product_begins_a_layer_right_behind_the_one_before():
    """All submeshes between two products are equally good; the first is taken, so that the later layer holds its input
    only, and makes what is behind the product again.
    """

    def loss(params, batch, key):
        x = batch
        for n in "abc":
            x = jnp.tanh(x @ params[n])
        return jnp.mean(x), {}

    forward = traced(loss, weights("abc"))
    cuts = find_layers(forward)
    names = [forward.jaxpr.eqns[forward.main[k]].primitive.name for k in cuts.starts]
    assert names == ["dot_general", "tanh", "tanh"]
    assert parameters(forward, cuts) == [["a"], ["b"], ["c"]] and sent(forward, cuts) == [1, 1]
    assert cuts.span(0, 2) == (0, cuts.starts[2]) and cuts.span(2, 3) == (cuts.starts[2], cuts.stop)


def test_with_residuals_it_is_cut_between_the_blocks_only():
    """Inside a block the stream is alive beside the hidden values."""

    def loss(params, batch, key):
        x = batch @ params["a"]
        for up, down in ("bc", "de"):
            x = x + jnp.tanh(x @ params[up]) @ params[down]
        return jnp.mean((x @ params["f"]) ** 2), {}

    forward = traced(loss, weights("abcdef"))
    cuts = find_layers(forward)
    assert parameters(forward, cuts) == [["a"], ["b", "c"], ["d", "e"], ["f"]]
    assert sent(forward, cuts) == [1, 1, 1]


def test_a_narrow_submesh_is_a_cut_though_a_skip_is_alive_beside_it():
    """A bottleneck under a skip: two values cross, but on both sides more bytes do."""
    narrow = {
        "down": jax.ShapeDtypeStruct((WIDTH, 8), jnp.float32),
        "up": jax.ShapeDtypeStruct((8, WIDTH), jnp.float32),
    }

    def loss(params, batch, key):
        skip = batch @ params["a"]
        x = jnp.tanh(jnp.tanh(skip @ params["b"]) @ params["down"])
        x = jnp.tanh(x @ params["up"]) @ params["c"] + skip
        return jnp.mean((x @ params["d"]) ** 2), {}

    forward = traced(loss, weights("abcd") | narrow)
    assert parameters(forward, find_layers(forward)) == [["a"], ["b", "down"], ["c", "up"], ["d"]]
    assert sent(forward, find_layers(forward)) == [1, 2, 1]


def test_checkpointed_blocks_that_all_read_an_earlier_value_are_layers():
    """As in a decoder, whose blocks read what the encoder made: two values cross, and only one within the encoder."""

    def block(w, x, other):
        return x + jnp.tanh((x + other) @ w) @ w.T

    def loss(p, batch, key):
        run = jax.checkpoint(block)
        encoded = x = batch
        for name in "ab":
            encoded = run(p[name], encoded, 0.0)
        for name in "cdef":
            x = run(p[name], x, encoded)
        return jnp.sum(x**2), {}

    forward = traced(loss, weights("abcdef"))
    cuts = find_layers(forward)
    assert parameters(forward, cuts) == [[n] for n in "abcdef"]
    # the batch is every stage's own; so the first block of the decoder takes the encoder's output alone
    assert sent(forward, cuts) == [1, 1, 2, 2, 2]


def test_a_scan_is_one_layer():
    """Layers that are stacked and scanned cannot be taken apart; what is around them can."""

    def loss(params, batch, key):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), batch @ params["a"], params["stack"])
        return jnp.mean((x @ params["b"]) ** 2), {}

    stack = {"stack": jax.ShapeDtypeStruct((3, WIDTH, WIDTH), jnp.float32)}
    forward = traced(loss, weights("ab") | stack)
    assert parameters(forward, find_layers(forward)) == [["a"], ["stack"], ["b"]]


def test_what_is_read_everywhere_keeps_products_together():
    """Each product reads all before it: more and more is alive, until the sum of all begins."""

    def loss(params, batch, key):
        values = [batch @ params["a"]]
        for n in "bcd":
            values.append(sum(values) @ params[n] + values[0])
        return jnp.mean(sum(values) @ params["e"]), {}

    forward = traced(loss, weights("abcde"))
    assert parameters(forward, find_layers(forward)) == [["a"], ["b", "c", "d"], ["e"]]


def test_what_cannot_be_cut_is_one_layer_with_a_warning():
    forward = traced(lambda params, batch, key: (jnp.mean(jnp.tanh(batch @ params["a"])), {}), weights("a"))
    cuts = find_layers(forward)
    assert (cuts.num_layers, cuts.starts) == (1, (0,))
    assert "fewer than two of them are heavy" in cuts.warning
