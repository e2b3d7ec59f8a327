"""The graph network: size, messages, the order of nodes and edges."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import zoo_checks
from autoshard_models import graph_network
from autoshard_models.optimizers import adamw
from autoshard_models.train_step import build

SMALL = dataclasses.replace(graph_network.PRESETS["tiny"], num_layers=1, latent_dim=16)


def batch_of(seed: int = 0) -> dict[str, jax.Array]:
    rng, shapes = np.random.default_rng(seed), graph_network.batch_shapes(SMALL)
    draw = lambda shape: (
        rng.integers(SMALL.num_nodes, size=shape.shape, dtype=np.int32)
        if shape.dtype == jnp.int32
        else rng.normal(size=shape.shape).astype(np.float32)
    )
    return jax.tree.map(lambda shape: jnp.asarray(draw(shape)), shapes)


def outputs(model: graph_network.GraphNetwork, batch: dict[str, jax.Array]) -> jax.Array:
    return model(batch["nodes"], batch["edges"], batch["senders"], batch["receivers"])


def test_rounds_have_their_published_size():
    """16 rounds of 4 + 3 matrices of 512 x 512, 4 vectors behind each pair; 29 of GraphCast's 36.7 million."""
    pair = lambda matrices: matrices * 512 * 512 + 4 * 512
    encoders = pair(1) + 256 * 512 + pair(1) + 4 * 512
    expected = 16 * (pair(4) + pair(3)) + encoders + 512 * 256 + 256
    assert zoo_checks.num_params(build(graph_network.PRESETS["weather"], adamw())) == expected


def test_a_node_hears_its_senders_and_no_others():
    model, batch = graph_network.GraphNetwork(SMALL, rngs=zoo_checks.rngs()), batch_of()
    sender = int(batch["senders"][0])
    hears = {sender, *np.asarray(batch["receivers"])[np.asarray(batch["senders"]) == sender].tolist()}
    changed = outputs(model, batch | {"nodes": batch["nodes"].at[sender].add(1.0)})
    differs = np.asarray((changed != outputs(model, batch)).any(axis=-1))
    assert set(np.flatnonzero(differs).tolist()) == hears


def test_the_order_of_edges_does_not_matter():
    model, batch = graph_network.GraphNetwork(SMALL, rngs=zoo_checks.rngs()), batch_of()
    order = np.random.default_rng(1).permutation(SMALL.num_edges)
    shuffled = batch | {name: batch[name][order] for name in ("edges", "senders", "receivers")}
    np.testing.assert_allclose(outputs(model, shuffled), outputs(model, batch), rtol=1e-4, atol=1e-5)
