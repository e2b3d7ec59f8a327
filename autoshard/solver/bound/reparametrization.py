"""A point of the dual: prices and messages, and the reduced costs that they make of a factor graph's costs."""

import dataclasses

import numpy as np

from autoshard.solver.factor_graph import FactorGraph


@dataclasses.dataclass(frozen=True, slots=True)
class Reparametrization:
    """An equal problem with the cost spread differently, as `messages.py` defines it.

    Attributes:
      graph: With a table for each factor that has usages (`with_own_tables`).
      prices: float64 [T]. messages: One number per class at each end of a factor.
      unary, tables: Priced costs of labels, float64 [L], and of factors, laid out as those of the graph.
      theta: float64 [L]; reduced costs of labels: priced costs and messages.
      bound: The lower bound that they prove, without the network's constant.
    """

    graph: FactorGraph
    prices: np.ndarray
    messages: np.ndarray
    unary: np.ndarray
    tables: np.ndarray
    theta: np.ndarray
    bound: float
