"""What outlasts one problem: keys of nodes and choices, and how near two problems are by them.

Two problems are near when they share many keys. The share is estimated from *bottom-k sketches*: the k least hashes of
either set of keys; of the k least of both together, the share that is in both sketches is an unbiased estimate of the
Jaccard index (Cohen and Kaplan, Summarizing data using bottom-k sketches, 2007).
"""

import collections
import dataclasses
import hashlib
import re
from collections.abc import Sequence

from autoshard.solver.problem import Problem

SKETCH = 128
"""Hashes kept of a problem's keys."""


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemKeys:
    """What the nodes of a problem are and what their choices mean, beyond one problem.

    Attributes:
      nodes: For each node, a text that the node of the same role has in a similar problem (another batch size, one
        layer more), such as the path of an argument.
      choices: For each node, a text for each choice, such as a layout. Nodes may share one tuple.
    """

    nodes: tuple[str, ...]
    choices: tuple[tuple[str, ...], ...]


def plain_keys(problem: Problem) -> ProblemKeys:
    """Keys for a problem of which nothing is known: names and numbers."""
    numbers = {len(node.costs): tuple(map(str, range(len(node.costs)))) for node in problem.nodes}
    return ProblemKeys(
        tuple(f"{node.name} of {len(node.costs)}" for node in problem.nodes),
        tuple(numbers[len(node.costs)] for node in problem.nodes),
    )


def sketch(keys: Sequence[str]) -> list[int]:
    """The `SKETCH` least 64-bit hashes of the distinct keys, in order."""
    hashes = {int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") for key in set(keys)}
    return sorted(hashes)[:SKETCH]


def overlap(one: Sequence[int], other: Sequence[int]) -> float:
    """Estimate of the Jaccard index of two sets of keys from their sketches."""
    union = sorted({*one, *other})[:SKETCH]
    both = set(one).intersection(other)
    return sum(value in both for value in union) / max(len(union), 1)


def carried_over(nodes: Sequence[str], choices: Sequence[str], problem: Problem, keys: ProblemKeys) -> tuple[int, ...]:
    """Choices for `problem`, from those of another: by key, by the key's pattern, or else the cheapest choice.

    Args:
      nodes, choices: Of the other problem: the key of each node, and that of the choice it took.
    """
    by_key = dict(zip(nodes, choices, strict=True))
    by_pattern: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for node, choice in by_key.items():
        by_pattern[_pattern(node)][choice] += 1
    usual = {pattern: [choice for choice, _ in counts.most_common()] for pattern, counts in by_pattern.items()}
    places: dict[int, dict[str, int]] = {}
    result = []
    for node, key, own in zip(problem.nodes, keys.nodes, keys.choices, strict=True):
        place = places.get(id(own))
        if place is None:
            place = places[id(own)] = {choice: k for k, choice in enumerate(own)}
        wanted = (by_key[key],) if key in by_key else ()
        known = next((place[c] for c in (*wanted, *usual.get(_pattern(key), ())) if c in place), None)
        result.append(int(node.costs.argmin()) if known is None else known)
    return tuple(result)


def _pattern(key: str) -> str:
    """A key without its numbers."""
    return re.sub(r"\d+", "*", key)
