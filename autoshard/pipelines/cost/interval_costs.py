"""Costs of runs of consecutive layers: what a stage costs, for every stage there could be."""

import dataclasses

import numpy as np

from autoshard.pipelines.cost.layers import Layers
from autoshard.pipelines.cost.table import CostKey, CostTable, LayerCost


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class IntervalCosts:
    """Costs of all runs of layers on one mesh option, for one micro-batch size.

    Every array is [layers + 1, layers + 1]: entry [i, j] is for the layers i <= l < j.

    Attributes:
      is_possible: Which runs there are: at least one layer, and a cost of each; other entries mean nothing.
      forward_s, backward_s, weight_s, update_s, residual_bytes, weight_residual_bytes, working_bytes: As in
        `LayerCost`: sums, and the greatest for `working_bytes`.
      input_bytes: What is held of a micro-batch where the run is computed again: the inputs of its first layer, and
        what later layers of it read from before it.
      kept_bytes: Weights and gradient sums on one device. gradient_bytes: The latter alone.
      optimizer_bytes: Optimizer state of what the run owns if there is one replica.
      sent_weight_bytes, sent_gradient_bytes: Of all devices together, of weights that no earlier layer reads.
    """

    is_possible: np.ndarray
    forward_s: np.ndarray
    backward_s: np.ndarray
    weight_s: np.ndarray
    update_s: np.ndarray
    residual_bytes: np.ndarray
    weight_residual_bytes: np.ndarray
    working_bytes: np.ndarray
    input_bytes: np.ndarray
    kept_bytes: np.ndarray
    gradient_bytes: np.ndarray
    optimizer_bytes: np.ndarray
    sent_weight_bytes: np.ndarray
    sent_gradient_bytes: np.ndarray

    def window(self, rows: slice, columns: slice) -> "IntervalCosts":
        """Some of the entries."""
        return IntervalCosts(*(getattr(self, f.name)[rows, columns] for f in dataclasses.fields(self)))


class IntervalCostTable:
    """Run costs by mesh option and micro-batch size, each made when it is first asked for."""

    def __init__(self, layers: Layers, table: CostTable):
        self.layers = layers
        self.table = table
        self._made: dict[tuple[int, int], IntervalCosts] = {}
        self._boundaries: dict[int, np.ndarray] = {}

    def costs(self, option: int, micro_batch_size: int) -> IntervalCosts:
        """Costs of all runs on one mesh option."""
        key = (option, micro_batch_size)
        if key not in self._made:
            self._made[key] = self._make(option, micro_batch_size)
        return self._made[key]

    def boundary_bytes(self, micro_batch_size: int) -> np.ndarray:
        """[2, layers + 1]: what any cut before a layer sends to the next stage, and the gradients that come back.

        Whatever else is cut: what the layer just before makes and the one just after reads.
        """
        if micro_batch_size not in self._boundaries:
            sizes = np.zeros((2, self.layers.num_layers + 1))
            for crossing in self.layers.activations:
                if crossing.source + 1 in crossing.readers:
                    size = crossing.example_bytes * (1 if crossing.is_shared else micro_batch_size)
                    sizes[:, crossing.source + 1] += size, size * crossing.has_gradient
            self._boundaries[micro_batch_size] = sizes
        return self._boundaries[micro_batch_size]

    def layer_costs(self, option: int, micro_batch_size: int) -> list[LayerCost | None]:
        """The cost of each layer; None where it is not possible."""
        found = {k: self.table.costs.get(CostKey(k, option, micro_batch_size)) for k in set(self.layers.kinds)}
        return [found[k] for k in self.layers.kinds]

    def _make(self, option: int, micro_batch_size: int) -> IntervalCosts:
        layers, num = self.layers, self.layers.num_layers
        each = self.layer_costs(option, micro_batch_size)
        known = [c if c is not None else _NOTHING for c in each]
        start, stop = np.arange(num + 1)[:, None], np.arange(num + 1)[None, :]
        is_possible = (start < stop) & (_sums([float(c is None) for c in each]) == 0)

        def sums(values: list[float]) -> np.ndarray:
            return np.where(is_possible, _sums(values), 0.0)

        new = [_new_share(layers, l, c) for l, c in enumerate(known)]  # part of a layer's weights that no earlier reads
        kept = _sums([c.weight_bytes + c.gradient_bytes for c in known])
        gradients = _sums([c.gradient_bytes for c in known])
        for shared in layers.shared_weights:
            for before, reader in zip(shared.readers, shared.readers[1:], strict=False):
                cost = known[reader]
                share = min(1.0, shared.size_bytes / cost.weight_total_bytes) if cost.weight_total_bytes else 0.0
                holds_both = (start <= before) & (stop > reader)
                kept = kept - holds_both * share * (cost.weight_bytes + cost.gradient_bytes)
                gradients = gradients - holds_both * share * cost.gradient_bytes
        working = np.zeros((num + 1, num + 1))
        for i in range(num):
            working[i, i + 1 :] = np.maximum.accumulate([c.working_bytes for c in known[i:]])
        inputs = np.broadcast_to(np.array([c.input_bytes for c in known] + [0.0])[:, None], (num + 1, num + 1)).copy()
        for crossing in layers.activations:
            size = crossing.example_bytes * (1 if crossing.is_shared else micro_batch_size)
            for i in range(crossing.source + 1, crossing.readers[-1]):
                reader = next(r for r in crossing.readers if r >= i)
                if reader > i:
                    inputs[i, reader + 1 :] += min(size, known[reader].input_bytes)
        ratios = [c.gradient_bytes / c.weight_bytes if c.weight_bytes else 0.0 for c in known]
        return IntervalCosts(
            is_possible=is_possible,
            forward_s=sums([c.forward_s for c in known]),
            backward_s=sums([c.backward_s for c in known]),
            weight_s=sums([c.weight_s for c in known]),
            update_s=sums([n * c.update_s for n, c in zip(new, known, strict=True)]),
            residual_bytes=_sums([c.residual_bytes for c in known]),
            weight_residual_bytes=_sums([c.weight_residual_bytes for c in known]),
            working_bytes=working,
            input_bytes=inputs,
            kept_bytes=kept,
            gradient_bytes=gradients,
            optimizer_bytes=_sums([n * c.optimizer_bytes for n, c in zip(new, known, strict=True)]),
            sent_weight_bytes=_sums([n * c.weight_total_bytes for n, c in zip(new, known, strict=True)]),
            sent_gradient_bytes=_sums(
                [n * r * c.weight_total_bytes for n, r, c in zip(new, ratios, known, strict=True)]
            ),
        )


_NOTHING = LayerCost(*[0.0] * 12)


def _sums(values: list[float]) -> np.ndarray:
    """[i, j]: the sum of values[i:j]."""
    before = np.concatenate([[0.0], np.cumsum(values)])
    return before[None, :] - before[:, None]


def _new_share(layers: Layers, layer: int, cost: LayerCost) -> float:
    """The part of a layer's weights that no earlier layer reads."""
    tied = sum(s.size_bytes for s in layers.shared_weights if layer in s.readers[1:])
    return max(0.0, 1 - tied / cost.weight_total_bytes) if cost.weight_total_bytes else 1.0
