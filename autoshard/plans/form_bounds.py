"""What the forms of a step take at least, in time and in memory, told from a loss with few of its layers.

With n_rp the layers of run r that keep what policy p says, N devices and c micro-batches:

    kernels(n)    = kernels(few) + sum_rp n_rp kernels_rp                        seconds of one device  (`kernels_s`)
    bytes(n, c)   = (state + gradients if c > 1 + (stored(few) + sum_rp n_rp stored_rp) / c) / N        (`least_bytes`)

Kernels are each as fast as any choice on any mesh makes them, and stored values are split over all devices: no plan of
the form takes less. What one layer adds is the difference between losses with three layers of a run and with four.

The policies of layers that take least within the memory are a choice in a knapsack, one for each run (`best`): with one
limit, the linear relaxation of that mixes at most two policies in one run (Sinha and Zoltners, The multiple-choice
knapsack problem, 1979), so that filling by what most time is spared for a byte is exact but for the last layer.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autoshard.cluster import LogicalMesh
from autoshard.cost.in_pieces import InPieces
from autoshard.planner.choices import fastest_kernels_s
from autoshard.planner.mesh_prices import MeshPrices, PricesOfMeshes
from autoshard.planner.program import Program, most_stored_bytes, prepare
from autoshard.plans.host_memory import is_offloading
from autoshard.plans.options import PlanOptions
from autoshard.remat.few_layers import FewLayers
from autoshard.remat.policy import Keep, LayerRun, RematPolicy, RunPolicy
from autoshard.trace.flatten import TraceOptions
from autoshard.trace.trace import trace

_FEW = 3
"""As many layers of a run are left; those at its ends take other things than those between them."""

_SHARES = (0.97, 0.92, 0.85)
"""What is taken of the memory by what is known to be stored, until a plan fits: kernels need more beside it, and copies
and sums do."""


@dataclasses.dataclass(frozen=True, slots=True)
class Amount:
    """What a loss and its gradients take, or a part of them.

    Attributes:
      kernels_s: float64 [meshes]; on one device. stored_bytes: The most that is stored at once, on all devices.
    """

    kernels_s: np.ndarray
    stored_bytes: float

    def plus(self, other: "Amount", times: int) -> "Amount":
        """With `other` so many times more."""
        return Amount(self.kernels_s + times * other.kernels_s, self.stored_bytes + times * other.stored_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class PolicyAmounts:
    """What layers take that keep what a policy says.

    Attributes:
      of_rest: All but the layers. of_layer: One layer of each run.
    """

    of_rest: Amount
    of_layer: tuple[Amount, ...]


class FormBounds:
    """Bounds of forms; what is known of a policy is kept.

    Attributes:
      runs: The layers. keeps: The policies.
    """

    def __init__(
        self,
        few: FewLayers,
        keeps: Sequence[Keep],
        state: Any,
        meshes: Sequence[LogicalMesh],
        prices: PricesOfMeshes,
        options: PlanOptions,
        parts: int = 1,
        report: Callable[[Keep], None] = lambda _: None,
    ):
        """Asks nothing yet.

        Args:
          few: The loss. keeps: The policies. state: Of the step. meshes: All that may be searched.
          prices: On these; what is found is added. options: As for `plan`.
          parts: Micro-batches of the step as it is written. report: Hears of each policy.
        """
        self.runs, self.keeps, self._report = few.runs, tuple(keeps), report
        self._parts = parts
        self._few, self._meshes, self._prices, self._options = few, meshes, prices, options
        self._num_devices = meshes[0].num_devices
        self._state_bytes, self._param_bytes = _size_bytes(state), _size_bytes(state.params)
        self._of: dict[Keep, PolicyAmounts] = {}

    @functools.cached_property
    def mixes(self) -> bool:
        """Whether layers can be left out, and may differ in what they keep; else each policy is for all."""
        is_loop = any(run.is_loop for run in self.runs)
        return not is_loop and self._few.gradients(Keep.ALL, [_fewer(run) for run in self.runs]) is not None

    def kernels_s(self, policy: RematPolicy) -> float:
        """No plan of this form takes less, in any number of micro-batches and any memory."""
        return float(self._amount(policy).kernels_s.min())

    def least_bytes(self, policy: RematPolicy, count: int | None) -> float:
        """No plan of this form in so many micro-batches takes less memory on each device; 0.0 where residuals or state
        may lie in that of the host."""
        if is_offloading(self._options):
            return 0.0
        parts = count or self._parts
        sums_bytes = 0.0 if parts == 1 else self._param_bytes
        return (self._state_bytes + sums_bytes + self._amount(policy).stored_bytes / parts) / self._num_devices

    def uniform(self, keep: Keep) -> RematPolicy:
        """All layers keep the same."""
        return RematPolicy(tuple(RunPolicy(run, ((keep, run.count),)) for run in self.runs))

    @functools.cached_property
    def fastest_first(self) -> tuple[Keep, ...]:
        """The policies by their kernels."""
        return tuple(sorted(self.keeps, key=lambda keep: self.kernels_s(self.uniform(keep))))

    @property
    def least_s(self) -> float:
        """No form takes less."""
        return self.kernels_s(self.uniform(self.fastest_first[0]))

    @property
    def leanest(self) -> Keep:
        """The policy that takes least memory; of several the one that recomputes most."""
        return min(reversed(self.keeps), key=lambda keep: self._amount(self.uniform(keep)).stored_bytes)

    def best(self, count: int | None, budget_bytes: float) -> RematPolicy | None:
        """The policy with the least kernels that may fit; None if none does."""
        fits = lambda policy: self.least_bytes(policy, count) <= budget_bytes
        if not self.mixes or fits(self.uniform(self.fastest_first[0])):
            return next((p for p in map(self.uniform, self.fastest_first) if fits(p)), None)
        hulls = [self._hull(r) for r in range(len(self.runs))]
        chosen = [hull[0] for hull in hulls]
        policy = RematPolicy(tuple(RunPolicy(run, ((k, run.count),)) for run, k in zip(self.runs, chosen, strict=True)))
        if not fits(policy):
            return None
        steps = [(self._spared(r, a, b), r, b) for r, hull in enumerate(hulls) for a, b in zip(hull, hull[1:])]  # noqa: B905
        for _, r, keep in sorted(steps, key=lambda step: -step[0]):  # of a hull they come in turn
            fuller = [_with_run(policy, r, keep, n) for n in range(self.runs[r].count, -1, -1)]
            policy = next((p for p in fuller if fits(p)), policy)
            if policy is not fuller[0]:
                break
        return policy

    def offers(self, count: int | None, budget_bytes: float) -> Iterator[tuple[float, RematPolicy]]:
        """Policies to try in so many micro-batches, each different, in turn until one fits; each with the share of the
        memory that it may fill."""
        if is_offloading(self._options):  # what fits is not known
            yield from ((1.0, self.uniform(keep)) for keep in self.fastest_first)
            return
        before = None
        for share in _SHARES:
            policy = self.best(count, share * budget_bytes)
            if policy is not None and policy != before:
                yield share, policy
            before = policy

    def _spared(self, run: int, more: Keep, less: Keep) -> float:
        """Seconds that a layer is faster for a byte that it stores more, if it recomputes less."""
        a, b = self._layer(run, more), self._layer(run, less)
        return (a[1] - b[1]) / (b[0] - a[0])

    def _layer(self, run: int, keep: Keep) -> tuple[float, float]:
        """(bytes stored, seconds of kernels) of one layer."""
        amount = self._amounts(keep).of_layer[run]
        return amount.stored_bytes, float(amount.kernels_s[self._place])

    @functools.cached_property
    def _place(self) -> int:
        """The mesh on which kernels are the fastest."""
        return int(self._amount(self.uniform(self.keeps[0])).kernels_s.argmin())

    def _hull(self, run: int) -> list[Keep]:
        """The policies of a run of which mixtures are the fastest, by what they store: the lower convex hull."""
        hull: list[Keep] = []
        for keep in sorted(self.keeps, key=lambda k: self._layer(run, k)):
            stored_bytes, kernels_s = self._layer(run, keep)
            if hull and (kernels_s >= self._layer(run, hull[-1])[1] or stored_bytes <= self._layer(run, hull[-1])[0]):
                continue
            while len(hull) > 1 and self._spared(run, hull[-2], hull[-1]) <= self._spared(run, hull[-1], keep):
                hull.pop()
            hull.append(keep)
        return hull

    def _amount(self, policy: RematPolicy) -> Amount:
        """Of the loss under a policy; of what layers share, the least that any of their policies makes of it."""
        used = {keep for own in policy.runs for keep, _ in own.kept}
        rests = [self._amounts(keep).of_rest for keep in used]
        total = Amount(np.min([a.kernels_s for a in rests], axis=0), min(a.stored_bytes for a in rests))
        for r, own in enumerate(policy.runs):
            for keep, count in own.kept:
                total = total.plus(self._amounts(keep).of_layer[r], count)
        return total

    def _amounts(self, keep: Keep) -> PolicyAmounts:
        if keep not in self._of:
            self._report(keep)
            few = [_fewer(run) if self.mixes else run.count for run in self.runs]
            total = self._measured(keep, few)
            none = Amount(np.zeros(len(self._meshes)), 0.0)
            layers = []
            for r in range(len(self.runs)):
                more = [n + (r == other) for other, n in enumerate(few)]
                layers.append(self._measured(keep, more).plus(total, -1) if self.mixes else none)
            rest = total
            for count, layer in zip(few, layers, strict=True):
                rest = rest.plus(layer, -count)
            self._of[keep] = PolicyAmounts(rest, tuple(layers))
        return self._of[keep]

    def _measured(self, keep: Keep, counts: Sequence[int]) -> Amount:
        found = self._few.gradients(keep, counts)
        assert found is not None  # `mixes`
        fn, args = found
        program = prepare(trace(fn, args, (), TraceOptions(self._options.while_trips)).graph)
        stored_bytes = most_stored_bytes(program, {a.value for a in program.graph.arguments})
        kernels_s = [least_kernels_s(program, self._prices.on(mesh), self._options) for mesh in self._meshes]
        return Amount(np.array(kernels_s), stored_bytes)


def least_kernels_s(program: Program, prices: MeshPrices, options: PlanOptions) -> float:
    """What the kernels of a program take on one device, each in the choice that makes it the fastest.

    Args:
      program: The program. prices: Of its operations on a mesh; what is found is added. options: As for `plan`.
    """
    return fastest_kernels_s(program.groups, [prices.table(s, options.lookups, InPieces()) for s in program.shapes])


def _fewer(run: LayerRun) -> int:
    """How many layers of a run are left."""
    return min(_FEW, run.count - 1)


def _with_run(policy: RematPolicy, r: int, keep: Keep, count: int) -> RematPolicy:
    """A policy whose run `r`, of layers that all keep the same, keeps something else in its last `count` layers."""
    own = policy.runs[r]
    kept = (own.kept[0][0], own.run.count - count), (keep, count)
    return RematPolicy((*policy.runs[:r], RunPolicy(own.run, tuple(k for k in kept if k[1])), *policy.runs[r + 1 :]))


def _size_bytes(tree: Any) -> float:
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x.dtype, "itemsize")]
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves))
