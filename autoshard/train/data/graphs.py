"""Random graphs with a planted rule: what each node has to tell is a sum over the edges that arrive there."""

import numpy as np

from autoshard.train.data.batches import ALL, Batch, Examples

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
    examples: Examples = ALL,
) -> Batch:
    """Graphs joined into one, without edges between them.

    The target of node v is C x_v + D times the sum over edges e from u to v of tanh(A x_u + B f_e) / sqrt(edges per
    node), where x are the features of nodes and f those of edges, all normal, and the tanh has 8 components. A, B, C
    and D are the same for every seed, and such that what they give is of the order of 1.

    Each graph has random numbers of its own, and its sums are taken alone, so that a graph is the same bit by bit
    whichever others are made beside it.

    Args:
        rng: gives each graph its seed.
        num_graphs: graphs of a batch.
        num_nodes, num_edges: nodes and edges of one graph.
        node_features, edge_features, num_targets: numbers at each node, at each edge, and to predict at each node.

        examples: which of the graphs to make.

    Returns:
        The batch of `autoshard_models.graph_network.batch_shapes`.
    """
    rule = np.random.default_rng(0)
    matrix = lambda rows, columns: (rule.standard_normal((rows, columns)) / np.sqrt(rows)).astype(np.float32)
    of_sender, of_edge = matrix(node_features, MESSAGE_DIM), matrix(edge_features, MESSAGE_DIM)
    of_messages, of_node = matrix(MESSAGE_DIM, num_targets), matrix(node_features, num_targets)
    seeds = rng.integers(2**63, size=num_graphs)

    def graph(number: int) -> Batch:
        own = np.random.default_rng(seeds[number])
        nodes = own.standard_normal((num_nodes, node_features), np.float32)
        edges = own.standard_normal((num_edges, edge_features), np.float32)
        senders, receivers = own.integers(num_nodes, size=(2, num_edges))
        messages = np.tanh((nodes @ of_sender)[senders] + edges @ of_edge) / np.sqrt(num_edges / num_nodes)
        received = np.stack([np.bincount(receivers, column, num_nodes) for column in messages.T], axis=1)
        first_node = number * num_nodes
        return {
            "nodes": nodes,
            "edges": edges,
            "senders": (first_node + senders).astype(np.int32),
            "receivers": (first_node + receivers).astype(np.int32),
            "targets": nodes @ of_node + received.astype(np.float32) @ of_messages,
        }

    graphs = [graph(number) for number in np.arange(num_graphs)[examples]]
    return {name: np.concatenate([one[name] for one in graphs]) for name in graphs[0]}
