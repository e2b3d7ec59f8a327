"""The core of a graph problem: what is left for message passing when capacity counts at a few instants only.

Dropping the capacity at an instant relaxes the problem, so a bound of the relaxation is a bound. In problems that come
from programs, a few instants carry all of the capacity's price, while most nodes are short-lived values that hang on
one neighbour. Without the capacity of the other instants those leaves can be minimised out exactly, again and again
until none is left; what remains is the core.

The minimisation is written as messages (`messages.py`): a leaf gives all of its cost to its factor, and the factor
gives its minimum over the leaf to the neighbour. So the messages of a core, together with those of the leaves, are
messages of the whole problem, and prove the same bound there.
"""

import numpy as np

from autoshard.solver.factor_graph import FactorGraph, grouped, message_count, offsets, ranges, with_own_tables
from autoshard.solver.kernels import kernel


class CoreGraph:
    """The core of `graph` for the instants `active`.

    Attributes:
      graph: The core as a `FactorGraph` of its own; its instants are the active ones. What is used at these has tables
        of its own, everything else those of the whole.
      active: bool [T]. nodes, factors: Their indices in the whole problem, int64.
      constant: Cost of the parts that were minimised out completely.
    """

    def __init__(self, whole: FactorGraph, active: np.ndarray) -> None:
        self.whole, self.active = whole, active
        position = np.concatenate([[0], np.cumsum(active)])
        usage_node = np.repeat(np.arange(len(whole.label_start) - 1), np.diff(whole.usage_start))
        pair_factor = np.repeat(np.arange(len(whole.source)), np.diff(whole.pair_start))
        usages = _ActiveDemands(position, usage_node, whole.usage_first, whole.usage_last, whole.usage_amounts)
        pairs = _ActiveDemands(position, pair_factor, whole.pair_first, whole.pair_last, whole.pair_amounts)
        count, factors = len(whole.label_start) - 1, len(whole.source)
        self._unary, self._messages = whole.unary.copy(), np.zeros(message_count(whole))
        self._order, self._link = np.empty(count, np.int64), np.empty(count, np.int64)
        used, paired = usages.owned(count), pairs.owned(factors)
        left, unlinked = np.zeros(count, bool), np.zeros(factors, bool)
        most = max(int(whole.rows.max(initial=1)), int(whole.columns.max(initial=1)))
        degree = np.bincount(whole.source, minlength=count) + np.bincount(whole.target, minlength=count)
        scratch = np.empty((2, most)), np.empty(count, np.int64), degree
        self._peeled, self.constant = peel(
            whole, used, paired, self._unary, self._messages, self._order, self._link, left, unlinked, *scratch
        )
        self.nodes, self.factors = np.flatnonzero(~left), np.flatnonzero(~unlinked)
        number, factor_number = np.cumsum(~left) - 1, np.cumsum(~unlinked) - 1
        sizes = np.diff(whole.label_start)
        source, target = number[whole.source[self.factors]], number[whole.target[self.factors]]
        rows, columns = whole.rows[self.factors], whole.columns[self.factors]
        message_start = offsets(np.stack([rows, columns], axis=1).ravel())
        in_start, in_factors = grouped(target, len(self.nodes))
        out_start, out_factors = grouped(source, len(self.nodes))
        self._place = ranges(whole.source_message[self.factors], rows + columns)
        core = FactorGraph(
            label_start=offsets(sizes[self.nodes]), unary=self._unary[np.repeat(~left, sizes)],
            source=source, target=target, rows=rows, columns=columns,
            source_map=whole.source_map[self.factors], target_map=whole.target_map[self.factors],
            classes=whole.classes, table=whole.table[self.factors], tables=whole.tables,
            source_message=message_start[:-1][0::2].copy(), target_message=message_start[:-1][1::2].copy(),
            in_start=in_start, in_factors=in_factors, out_start=out_start, out_factors=out_factors,
            usage_start=offsets(np.bincount(number[usages.owner], minlength=len(self.nodes))),
            usage_first=usages.first, usage_last=usages.last, usage_amounts=usages.amounts,
            pair_start=offsets(np.bincount(factor_number[pairs.owner], minlength=len(self.factors))),
            pair_first=pairs.first, pair_last=pairs.last, pair_amounts=pairs.amounts,
            amounts=whole.amounts, capacity=whole.capacity[active],
        )  # fmt: skip
        self.graph = with_own_tables(core)

    def messages_from(self, messages: np.ndarray) -> np.ndarray:
        """The core's share of messages of the whole problem."""
        return messages[self._place]

    def whole_messages(self, messages: np.ndarray) -> np.ndarray:
        """Messages of the whole problem: the core's, and those that minimise the leaves."""
        result = self._messages.copy()
        result[self._place] = messages
        return result

    def whole_labels(self, labels: np.ndarray) -> np.ndarray:
        """The core's labels int64, and the cheapest beside them for the leaves; int64 [n]."""
        result = np.zeros(len(self.whole.label_start) - 1, np.int64)
        result[self.nodes] = labels
        unpeel(self.whole, self._unary, self._order[: self._peeled], self._link, result)
        return result


class _ActiveDemands:
    """Usages restricted to the active instants; those that are live at none are dropped."""

    def __init__(
        self, position: np.ndarray, owner: np.ndarray, first: np.ndarray, last: np.ndarray, amounts: np.ndarray
    ) -> None:
        first, last = position[first], position[last]
        live = first < last
        self.owner, self.first, self.last, self.amounts = owner[live], first[live], last[live], amounts[live]

    def owned(self, count: int) -> np.ndarray:
        """bool [count]: which owners have a usage."""
        return np.bincount(self.owner, minlength=count)[:count] > 0


@kernel()
def peel(
    graph: FactorGraph,
    used: np.ndarray,
    paired: np.ndarray,
    unary: np.ndarray,
    messages: np.ndarray,
    order: np.ndarray,
    link: np.ndarray,
    left: np.ndarray,
    unlinked: np.ndarray,
    minima: np.ndarray,
    stack: np.ndarray,
    degree: np.ndarray,
) -> tuple[int, float]:
    """Minimises out nodes with at most one factor while there are any. (Allocates nothing, which compiles faster.)

    Args:
      used bool [n], paired bool [m]: nodes and factors with usages, which stay.
      unary: float64 [L], updated: neighbours get what leaves cost. messages: written at the leaves' factors.
      order, link: int64 [n], written: the nodes that left in this order, and the factor of each or -1.
      left, unlinked: bool [n] and [m], false; written: the nodes and the factors that left.
      minima: float64 [2, most classes], scratch. stack: int64 [n], scratch.
      degree: int64 [n], how many factors each node has; lowered.

    Returns:
      (number of nodes that left, constant cost).
    """
    count, height = len(left), 0
    own, given = minima[0], minima[1]
    for i in range(count - 1, -1, -1):
        if degree[i] <= 1 and not used[i]:
            stack[height] = i
            height += 1
    found, constant = 0, 0.0
    while height > 0:
        height -= 1
        i = stack[height]
        if left[i]:
            continue
        f = -1
        for p in range(graph.out_start[i], graph.out_start[i + 1]):
            if not unlinked[graph.out_factors[p]]:
                f = graph.out_factors[p]
        for p in range(graph.in_start[i], graph.in_start[i + 1]):
            if not unlinked[graph.in_factors[p]]:
                f = graph.in_factors[p]
        if f >= 0 and paired[f]:
            continue
        left[i] = True
        order[found], link[found] = i, f
        found += 1
        first, labels = graph.label_start[i], graph.label_start[i + 1] - graph.label_start[i]
        if f < 0:
            low = np.inf
            for k in range(labels):
                low = min(low, unary[first + k])
            constant += low
            continue
        unlinked[f] = True
        rows, columns, place = graph.rows[f], graph.columns[f], graph.table[f]
        is_source = graph.source[f] == i
        own_map = graph.source_map[f] if is_source else graph.target_map[f]
        for c in range(len(own)):
            own[c] = given[c] = np.inf
        for k in range(labels):
            c = graph.classes[own_map + k]
            own[c] = min(own[c], unary[first + k])
        for a in range(rows):
            for b in range(columns):
                if is_source:
                    given[b] = min(given[b], own[a] + graph.tables[place + a * columns + b])
                else:
                    given[a] = min(given[a], own[b] + graph.tables[place + a * columns + b])
        j = graph.target[f] if is_source else graph.source[f]
        other_map = graph.target_map[f] if is_source else graph.source_map[f]
        for k in range(graph.label_start[j + 1] - graph.label_start[j]):
            unary[graph.label_start[j] + k] += given[graph.classes[other_map + k]]
        own_message = graph.source_message[f] if is_source else graph.target_message[f]
        other_message = graph.target_message[f] if is_source else graph.source_message[f]
        for c in range(rows if is_source else columns):
            messages[own_message + c] = -own[c]
        for c in range(columns if is_source else rows):
            messages[other_message + c] = given[c]
        degree[j] -= 1
        if degree[j] <= 1 and not used[j]:
            stack[height] = j
            height += 1
    return found, float(constant)


@kernel()
def unpeel(graph: FactorGraph, unary: np.ndarray, order: np.ndarray, link: np.ndarray, labels: np.ndarray) -> None:
    """Sets the labels of the nodes in `order`, from the last to leave to the first."""
    for step in range(len(order) - 1, -1, -1):
        i, f = order[step], link[step]
        first = graph.label_start[i]
        place, stride, own_map = 0, 0, 0
        if f >= 0 and graph.source[f] == i:
            own_map, stride = graph.source_map[f], graph.columns[f]
            place = graph.table[f] + graph.classes[graph.target_map[f] + labels[graph.target[f]]]
        elif f >= 0:
            own_map, stride = graph.target_map[f], 1
            place = graph.table[f] + graph.classes[graph.source_map[f] + labels[graph.source[f]]] * graph.columns[f]
        best, choice = np.inf, 0
        for k in range(graph.label_start[i + 1] - first):
            value = unary[first + k]
            if f >= 0:
                value += graph.tables[place + stride * graph.classes[own_map + k]]
            if value < best:
                best, choice = value, k
        labels[i] = choice
