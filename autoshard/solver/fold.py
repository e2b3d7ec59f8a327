"""The tied problem: nodes that are copies of one another (`Node.twin`) share one choice.

Its solutions are solutions of the whole problem with the same cost, found in a fraction of the time; its bound says
nothing about the whole problem. Costs of the copies add up. A factor between two copies of one node becomes a cost of
that node, and the table is one of class pairs that one label gives to both ends.
"""

import numpy as np

from autoshard.solver.problem import Edge, EdgeUsage, Node, Problem, Usage


def fold(problem: Problem) -> tuple[Problem, np.ndarray] | None:
    """Returns the tied problem and the tied node of every node, int64 [n]; None if no two nodes are twins.

    Twins whose number of choices differs are not tied.
    """
    group: dict[tuple, int] = {}
    member = np.empty(len(problem.nodes), np.int64)
    for index, node in enumerate(problem.nodes):
        key = ("alone", index) if node.twin is None else ("twin", node.twin, len(node.costs))
        member[index] = group.setdefault(key, len(group))
    if len(group) == len(problem.nodes):
        return None
    costs: list[np.ndarray | None] = [None] * len(group)
    for node, tied in zip(problem.nodes, member, strict=True):
        costs[tied] = node.costs if costs[tied] is None else costs[tied] + node.costs
    usages = [Usage(int(member[usage.node]), usage.start, usage.stop, usage.amounts) for usage in problem.usages]
    edges: dict[tuple, list] = {}
    edge_of: dict[int, int] = {}
    for index, edge in enumerate(problem.edges):
        source, target = int(member[edge.source]), int(member[edge.target])
        if source == target:
            costs[source] = costs[source] + edge.costs[edge.source_class, edge.target_class]
            continue
        key = (source, target, id(edge.source_class), id(edge.target_class), edge.costs.shape)
        place = edges.setdefault(key, [len(edges), edge, {}])
        times = place[2].setdefault(id(edge.costs), [edge.costs, 0])
        times[1] += 1
        edge_of[index] = place[0]
    tied_edges = []
    for (source, target, *_), (_, edge, tables) in edges.items():
        table = sum(table * count for table, count in tables.values())
        tied_edges.append(Edge(source, target, edge.source_class, edge.target_class, table))
    edge_usages = []
    for usage in problem.edge_usages:
        edge = problem.edges[usage.edge]
        if usage.edge in edge_of:
            edge_usages.append(EdgeUsage(edge_of[usage.edge], usage.start, usage.stop, usage.amounts))
        else:
            amounts = usage.amounts[edge.source_class, edge.target_class]
            usages.append(Usage(int(member[edge.source]), usage.start, usage.stop, amounts))
    first: dict[int, Node] = {}
    for node, tied in zip(problem.nodes, member, strict=True):
        first.setdefault(int(tied), node)
    nodes = tuple(Node(first[tied].name, costs[tied]) for tied in range(len(group)))
    return Problem(nodes, tuple(tied_edges), tuple(usages), tuple(edge_usages), problem.capacity), member
