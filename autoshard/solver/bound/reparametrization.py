"""A point of the dual: prices and messages, and the reduced costs that they make of a factor graph's costs."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Reparametrization:
    """An equal problem with the cost spread differently, as `messages.py` defines it.

    Attributes:
      prices: float64 [T]. messages: One number per class at each end of a factor.
      unary, tables: Priced costs of labels, float64 [L], and of factors, laid out as those of the graph.
      theta: float64 [L]; reduced costs of labels: priced costs and messages.
      bound: The lower bound that they prove, without the network's constant.
    """

    prices: np.ndarray
    messages: np.ndarray
    unary: np.ndarray
    tables: np.ndarray
    theta: np.ndarray
    bound: float
