"""Random graphs with a planted rule: what each node has to tell is a sum over the edges that arrive there."""

import numpy as np

from autoshard.train.data.batches import Batch

MESSAGE_DIM = 8
"""Components of what an edge tells; so few that a batch of GraphCast's size needs little memory."""


def graph_batch(
    rng: np.random.Generator,
    num_graphs: int,
    *,
    num_nodes: int,
    num_edges: int,
    node_features: int,
    edge_features: int,
    num_targets: int,
) -> Batch:
    """Graphs joined into one, without edges between them.

    The target of node v is C x_v + D times the sum over edges e from u to v of tanh(A x_u + B f_e) / sqrt(edges per
    node), where x are the features of nodes and f those of edges, all normal, and the tanh has 8 components. A, B, C
    and D are the same for every seed, and such that what they give is of the order of 1.

    Args:
        rng: draws features and ends of edges.
        num_graphs: graphs.
        num_nodes, num_edges: nodes and edges of one graph.
        node_features, edge_features, num_targets: numbers at each node, at each edge, and to predict at each node.

    Returns:
        The batch of `autoshard_models.graph_network.batch_shapes`.
    """
    rule = np.random.default_rng(0)
    matrix = lambda rows, columns: (rule.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
    of_sender, of_edge = matrix(node_features, MESSAGE_DIM), matrix(edge_features, MESSAGE_DIM)
    of_messages, of_node = matrix(MESSAGE_DIM, num_targets), matrix(node_features, num_targets)
    nodes = rng.standard_normal((num_graphs * num_nodes, node_features), np.float32)
    edges = rng.standard_normal((num_graphs * num_edges, edge_features), np.float32)
    first_nodes = np.repeat(np.arange(num_graphs) * num_nodes, num_edges)
    senders, receivers = first_nodes + rng.integers(num_nodes, size=(2, num_graphs * num_edges))
    messages = np.tanh((nodes @ of_sender)[senders] + edges @ of_edge) / np.sqrt(num_edges / num_nodes)
    received = np.stack([np.bincount(receivers, column, len(nodes)) for column in messages.T], axis=1)
    targets = nodes @ of_node + received.astype(np.float32) @ of_messages
    return {
        "nodes": nodes,
        "edges": edges,
        "senders": senders.astype(np.int32),
        "receivers": receivers.astype(np.int32),
        "targets": targets,
    }
