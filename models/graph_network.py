"""A graph network in Flax NNX: messages along edges, summed at the nodes where they arrive by a segment sum.

Encode, process, decode (Battaglia et al. 2018, arXiv:1806.01261; Sanchez-Gonzalez et al. 2020, arXiv:2002.09405). A
batch is one graph of fixed size; smaller graphs are joined and padded with edges from a spare node to itself.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from .layers import repeated, types_of
from .losses import mean_squared_error
from .objective import Batch, Metrics, Objective, nnx_objective


@dataclasses.dataclass(frozen=True, slots=True)
class GraphNetworkConfig:
    """Sizes and options of a graph network.

    Attributes:
        num_nodes: nodes of a graph.
        num_edges: edges of a graph.
        node_features: features of a node.
        edge_features: features of an edge.
        num_targets: numbers to predict at each node.
        num_layers: rounds of messages.
        latent_dim: width of nodes and edges in between.
        dtype: type of activations and of matrix products.
        param_dtype: type in which parameters are stored.
        remat: keep only each round's inputs for the backward pass and compute the rest of the round again.
    """

    num_nodes: int
    num_edges: int
    node_features: int
    edge_features: int
    num_targets: int
    num_layers: int
    latent_dim: int
    dtype: DTypeLike = jnp.float32
    param_dtype: DTypeLike = jnp.float32
    remat: bool = False


class NormedMLP(nnx.Module):
    """Two linear layers with a SiLU between them and a layer norm behind."""

    def __init__(self, in_dim: int, config: GraphNetworkConfig, *, rngs: nnx.Rngs):
        types, latent = types_of(config), config.latent_dim
        self.first = nnx.Linear(in_dim, latent, rngs=rngs, **types)
        self.second = nnx.Linear(latent, latent, rngs=rngs, **types)
        self.norm = nnx.LayerNorm(latent, rngs=rngs, **types)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.norm(self.second(jax.nn.silu(self.first(x))))


class Round(nnx.Module):
    """One round of messages: edges read their ends, nodes read the sum of the edges that arrive."""

    def __init__(self, config: GraphNetworkConfig, *, rngs: nnx.Rngs):
        self.edge_update = NormedMLP(3 * config.latent_dim, config, rngs=rngs)
        self.node_update = NormedMLP(2 * config.latent_dim, config, rngs=rngs)

    def __call__(
        self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        edges = edges + self.edge_update(jnp.concatenate([edges, nodes[senders], nodes[receivers]], axis=-1))
        received = jax.ops.segment_sum(edges, receivers, num_segments=nodes.shape[0])
        return nodes + self.node_update(jnp.concatenate([nodes, received], axis=-1)), edges


class GraphNetwork(nnx.Module):
    """Encoders of nodes and edges, rounds of messages, a linear decoder of nodes."""

    def __init__(self, config: GraphNetworkConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.node_encoder = NormedMLP(config.node_features, config, rngs=rngs)
        self.edge_encoder = NormedMLP(config.edge_features, config, rngs=rngs)
        self.rounds = repeated(lambda rngs: Round(config, rngs=rngs), config.num_layers, rngs)
        self.decoder = nnx.Linear(config.latent_dim, config.num_targets, rngs=rngs, **types_of(config))

    def __call__(self, nodes: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        """Predictions at the nodes.

        Args:
            nodes: float (num_nodes, node_features).
            edges: float (num_edges, edge_features).
            senders, receivers: int32 (num_edges,), the nodes at both ends of each edge.

        Returns:
            (num_nodes, num_targets) in `config.dtype`.
        """
        run = nnx.remat(Round.__call__) if self.config.remat else Round.__call__
        nodes, edges = self.node_encoder(nodes), self.edge_encoder(edges)
        for round_ in self.rounds:
            nodes, edges = run(round_, nodes, edges, senders, receivers)
        return self.decoder(nodes)


def objective(config: GraphNetworkConfig) -> Objective:
    """Regression at the nodes; see `batch_shapes`."""

    def loss(model: GraphNetwork, batch: Batch, _: jax.Array | None) -> tuple[jax.Array, Metrics]:
        predictions = model(batch["nodes"], batch["edges"], batch["senders"], batch["receivers"])
        return mean_squared_error(predictions, batch["targets"]), {}

    return nnx_objective(lambda rngs: GraphNetwork(config, rngs=rngs), loss)


def batch_shapes(config: GraphNetworkConfig, batch_size: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of a batch of `batch_size` graphs, joined into one."""
    num_nodes, num_edges = batch_size * config.num_nodes, batch_size * config.num_edges
    return {
        "nodes": jax.ShapeDtypeStruct((num_nodes, config.node_features), jnp.float32),
        "edges": jax.ShapeDtypeStruct((num_edges, config.edge_features), jnp.float32),
        "senders": jax.ShapeDtypeStruct((num_edges,), jnp.int32),
        "receivers": jax.ShapeDtypeStruct((num_edges,), jnp.int32),
        "targets": jax.ShapeDtypeStruct((num_nodes, config.num_targets), jnp.float32),
    }


PRESETS: Mapping[str, GraphNetworkConfig] = MappingProxyType(
    {
        "tiny": GraphNetworkConfig(
            num_nodes=32, num_edges=128, node_features=4, edge_features=2, num_targets=2, num_layers=2, latent_dim=32
        ),
        "weather": GraphNetworkConfig(
            num_nodes=41_984,
            num_edges=328_704,
            node_features=256,
            edge_features=4,
            num_targets=256,
            num_layers=16,
            latent_dim=512,
            dtype=jnp.bfloat16,
            remat=True,
        ),
    }
)
"""Sizes by name. `weather` has the rounds, the width and the mesh of GraphCast (Lam et al. 2022, arXiv:2212.12794):
40,962 nodes and 327,660 edges, here padded to multiples of 1,024; its grid of the globe is left out, and the number of
features is our own."""
