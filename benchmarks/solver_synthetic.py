"""A transformer-like choice problem of any size, to time the solver on; `python benchmarks/solver_synthetic.py`.

Layers of equal nodes: half of each layer is forward, half backward, in mirrored order. Every node is an operation
whose choice fixes the layout of what it reads and of what it gives; edges are tensors, priced by a random but
distance-like resharding table over layouts; each forward node feeds its backward mirror (saved activations), residual
links skip within and between layers. Usages are activations from forward to backward, weights over the whole step,
short-lived results of the backward pass, and gradients of weights until the end.
"""

import argparse
import dataclasses

import numpy as np

from autoshard.solver import Edge, Node, Problem, SolverOptions, Usage, evaluate, solve


def transformer_problem(
    layers: int = 96,
    nodes_per_layer: int = 40,
    choices: int = 36,
    layouts: int = 9,
    seed: int = 0,
    capacity_ratio: float | None = None,
    noise: float = 0.0,
) -> Problem:
    """Builds the problem.

    Args:
      layouts: Classes at either end of an edge.
      capacity_ratio: Capacity relative to the peak of the choice that is cheapest per node; None for no capacity.
      noise: Relative difference between the copies of a layer; 0 makes them equal.
    """
    rng = np.random.default_rng(seed)
    half = nodes_per_layer // 2
    price = 10.0 ** rng.uniform(-6, -2, (half,))
    share = 1.0 / 2.0 ** rng.integers(0, 5, layouts)
    distance = rng.random((layouts, layouts)) + 0.3
    np.fill_diagonal(distance, 0.0)
    read = [rng.integers(0, layouts, choices) for _ in range(nodes_per_layer)]
    give = [rng.integers(0, layouts, choices) for _ in range(nodes_per_layer)]
    own = [rng.random(choices) * price[k % half] * 0.5 for k in range(nodes_per_layer)]
    size = rng.integers(1, 100, half) * 1e6
    tables = [distance * price[k % half] for k in range(nodes_per_layer)]
    nodes, usages = [], []
    horizon = 2 * layers * half
    order = {}
    for sweep in (0, 1):
        for layer in range(layers) if sweep == 0 else reversed(range(layers)):
            for k in range(half):
                kind = k if sweep == 0 else nodes_per_layer - 1 - k
                order[layer, kind] = len(nodes)
                factor = 1.0 + noise * rng.random(choices) if noise else 1.0
                nodes.append(Node(f"layer{layer}/{kind}", own[kind] * factor))
    edges = []

    def link(a: tuple[int, int], b: tuple[int, int], kind: int) -> None:
        if a in order and b in order:
            edges.append(Edge(order[a], order[b], give[a[1]], read[b[1]], tables[kind]))

    for layer in range(layers):
        for k in range(half):
            up, down = nodes_per_layer - 1, nodes_per_layer - 1 - k
            if k + 1 < half:
                link((layer, k), (layer, k + 1), k)
                link((layer, down - 1), (layer, down), down)
            if k % 3 == 0:
                link((layer, k), (layer, down), k)
            if k % 5 == 0 and k + 4 < half:
                link((layer, k), (layer, k + 4), k + 1)
        link((layer, half - 1), (layer + 1, 0), 0)
        link((layer, half - 1), (layer + 1, half // 2), 1)
        link((layer + 1, half), (layer, nodes_per_layer - 1), up)
    for (_, kind), index in order.items():
        if kind < half:
            usages.append(Usage(index, index, horizon - index, size[kind] * share[give[kind]]))
            if kind % 4 == 0:
                usages.append(Usage(index, 0, horizon, 3 * size[kind] * share[read[kind]]))
        else:
            kind_of_forward = nodes_per_layer - 1 - kind
            transient = rng.random() if noise else 0.5
            usages.append(Usage(index, index, index + 3, transient * size[kind_of_forward] * share[give[kind]]))
            if kind_of_forward % 2 == 0:
                usages.append(Usage(index, index, horizon, 0.9 * size[kind_of_forward] * share[give[kind]]))
    problem = Problem(tuple(nodes), tuple(edges), tuple(usages))
    if capacity_ratio is None:
        return problem
    cheapest = [int(np.argmin(node.costs)) for node in problem.nodes]
    return dataclasses.replace(problem, capacity=capacity_ratio * evaluate(problem, cheapest).peak_usage)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--nodes", type=int, default=40)
    parser.add_argument("--choices", type=int, default=36)
    parser.add_argument("--layouts", type=int, default=9)
    parser.add_argument("--ratio", type=float, default=None)
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--gap", type=float, default=5e-3)
    parser.add_argument("--time", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    problem = transformer_problem(
        arguments.layers,
        arguments.nodes,
        arguments.choices,
        arguments.layouts,
        arguments.seed,
        arguments.ratio,
        arguments.noise,
    )
    print(f"{len(problem.nodes)} nodes, {len(problem.edges)} edges, {len(problem.usages)} usages")

    def show(progress):
        print(f"{progress.elapsed_s:8.2f} s  {progress.objective:.6g}  {progress.bound:.6g}  {progress.phase}")

    options = SolverOptions(time_limit_s=arguments.time, relative_gap=arguments.gap)
    print(solve(problem, options, on_progress=show).certificate)


if __name__ == "__main__":
    main()
