"""Random problems for the solver's tests."""

import dataclasses

import numpy as np

from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage


def random_problem(seed: int, max_nodes: int = 6, max_choices: int = 4) -> Problem:
    """A small problem with a random mix of everything: classes, forbidden entries, parallel edges, usages."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, max_nodes + 1))
    scale = 10.0 ** rng.integers(-6, 3)
    whole = rng.random() < 0.3
    forbidden = 0.15 if rng.random() < 0.5 else 0.0

    def costs(*shape):
        table = rng.integers(0, 5, shape).astype(float) if whole else rng.random(shape)
        table = table * scale
        table[rng.random(shape) < forbidden] = np.inf
        return table

    nodes = []
    for index in range(count):
        nodes.append(Node(f"n{index}", costs(int(rng.integers(1, max_choices + 1)))))
    edges = []
    for _ in range(int(rng.integers(0, 2 * count + 1)) if count > 1 else 0):
        source, target = (int(end) for end in rng.choice(count, 2, replace=False))
        rows, columns = (int(size) for size in rng.integers(1, 5, 2))
        edges.append(
            Edge(
                source,
                target,
                rng.integers(0, rows, len(nodes[source].costs)),
                rng.integers(0, columns, len(nodes[target].costs)),
                costs(rows, columns),
            )
        )
    usages, edge_usages, capacity = [], [], None
    if rng.random() < 0.7:
        horizon = 8
        for index in range(count):
            for _ in range(int(rng.integers(0, 3))):
                start, stop = sorted(int(t) for t in rng.integers(0, horizon, 2))
                usages.append(Usage(index, start, stop, rng.integers(0, 10, len(nodes[index].costs)) * 1e6))
        if rng.random() < 0.5:
            for index, edge in enumerate(edges):
                if rng.random() < 0.5:
                    start, stop = sorted(int(t) for t in rng.integers(0, horizon, 2))
                    edge_usages.append(EdgeUsage(index, start, stop, rng.integers(0, 10, edge.costs.shape) * 1e6))
        most = sum(float(usage.amounts.max()) for usage in (*usages, *edge_usages))
        capacity = most * float(rng.uniform(0.1, 0.8))
    return Problem(tuple(nodes), tuple(edges), tuple(usages), tuple(edge_usages), capacity)


def repeated(seed: int, link: str) -> Problem:
    """A block of one or two nodes, `copies` times: all linked to a hub, or one after another (a chain or a ring).

    Usages are those of activations: block k's live from k until its turn comes again, in reverse order.
    """
    rng = np.random.default_rng(seed)
    size, copies = int(rng.integers(1, 3)), int(rng.integers(2, 5))
    choices = int(rng.integers(2, 4))
    block = [Node(f"b{n}", rng.integers(0, 6, choices).astype(float)) for n in range(size)]
    amounts = [rng.integers(0, 6, choices).astype(float) for _ in range(size)]
    inner, outer, copied = (rng.integers(0, 6, (choices, choices)).astype(float) for _ in range(3))
    identity = np.arange(choices)
    nodes, edges, usages, pairs = [], [], [], []
    if link == "hub":
        nodes.append(Node("hub", rng.integers(0, 6, choices).astype(float)))
    first = [len(nodes) + k * size for k in range(copies)]
    for k, start in enumerate(first):
        nodes += block
        usages += [Usage(start + n, k, 2 * copies - k, amounts[n]) for n in range(size)]
        if size == 2:
            edges.append(Edge(start, start + 1, identity, identity, inner))
        if link == "hub":
            edges.append(Edge(0, start, identity, identity, outer))
        elif k or link == "ring":
            edges.append(Edge(first[k - 1] + size - 1, start, identity, identity, outer))
        if edges and rng.random() < 0.5:
            pairs.append(EdgeUsage(len(edges) - 1, k, k + 1, copied))
    if link == "ring" and copies * size < 3:
        return repeated(seed + 10_000, link)
    most = sum(float(u.amounts.max()) for u in (*usages, *pairs))
    capacity = None if rng.random() < 0.2 else most * float(rng.uniform(0.2, 0.8))
    return Problem(tuple(nodes), tuple(edges), tuple(usages), tuple(pairs), capacity)


def lifted(seed: int, sheets: int = 2) -> Problem:
    """A random cover of a random problem: every node and edge `sheets` times, edges joining copies by a permutation.

    All copies of a node see the same, whatever the permutations; but which copies an edge joins, and whether two edges
    join the same ones, is chance.
    """
    base = random_problem(seed, 3, 3)
    rng = np.random.default_rng(seed)
    nodes = tuple(node for node in base.nodes for _ in range(sheets))
    edges, pairs = [], []
    for index, edge in enumerate(base.edges):
        for copy, other in enumerate(rng.permutation(sheets).tolist()):
            ends = edge.source * sheets + copy, edge.target * sheets + other
            pairs += [dataclasses.replace(u, edge=len(edges)) for u in base.edge_usages if u.edge == index]
            edges.append(Edge(*ends, edge.source_class, edge.target_class, edge.costs))
    usages = [dataclasses.replace(u, node=u.node * sheets + copy) for u in base.usages for copy in range(sheets)]
    capacity = None if base.capacity is None else base.capacity * sheets * float(rng.uniform(0.7, 1.0))
    return Problem(nodes, tuple(edges), tuple(usages), tuple(pairs), capacity)


def random_tree(rng: np.random.Generator, max_nodes: int) -> Problem:
    """A tree without capacity."""
    count = int(rng.integers(2, max_nodes + 1))
    nodes = tuple(Node(f"n{index}", rng.random(int(rng.integers(1, 6)))) for index in range(count))
    edges = []
    for index in range(1, count):
        other = int(rng.integers(index))
        ends = (index, other) if rng.random() < 0.5 else (other, index)
        classes = [np.arange(len(nodes[end].costs)) for end in ends]
        edges.append(Edge(*ends, *classes, rng.random((len(classes[0]), len(classes[1])))))
    return Problem(nodes, tuple(edges))


def chain(count: int, choices: int, seed: int) -> tuple[Problem, float]:
    """A chain and its optimum by dynamic programming."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{index}", rng.random(choices)) for index in range(count))
    identity = np.arange(choices)
    tables = [rng.random((choices, choices)) for _ in range(count - 1)]
    edges = tuple(Edge(index, index + 1, identity, identity, table) for index, table in enumerate(tables))
    best = nodes[0].costs
    for node, table in zip(nodes[1:], tables, strict=True):
        best = (best[:, None] + table).min(axis=0) + node.costs
    return Problem(nodes, edges), float(best.min())


def grid(seed: int, side: int = 7, choices: int = 4, capacity: float | None = 0.4) -> Problem:
    """A frustrated grid, which message passing alone does not close; `capacity` from 0 (least) to 1 (slack)."""
    rng = np.random.default_rng(seed)
    nodes = tuple(Node(f"n{index}", rng.random(choices)) for index in range(side * side))
    edges = []
    for row in range(side):
        for column in range(side):
            for other in ((row, column + 1), (row + 1, column)):
                if max(other) < side:
                    edges.append(
                        Edge(
                            row * side + column,
                            other[0] * side + other[1],
                            np.arange(choices),
                            np.arange(choices),
                            2 * rng.random((choices, choices)),
                        )
                    )
    usages, limit = [], None
    if capacity is not None:
        for index in range(len(nodes)):
            usages.append(Usage(index, index, index + 20, rng.random(choices) * 1e9))
        live = [[usage.amounts for usage in usages if usage.start <= t < usage.stop] for t in range(len(nodes))]
        least = max(sum(float(amounts.min()) for amounts in at) for at in live)
        most = max(sum(float(amounts.max()) for amounts in at) for at in live)
        limit = least + capacity * (most - least)
    return Problem(nodes, tuple(edges), tuple(usages), capacity=limit)
