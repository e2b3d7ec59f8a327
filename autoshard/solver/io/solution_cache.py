"""Solutions kept on disk: an unchanged problem is answered at once, a changed one starts from the nearest solved one.

One file a problem, named by the problem's digest (`packed.py`): gzip-compressed JSON, two lines. The first line is what
a search for the nearest needs: sizes, certificate, and a sketch of the nodes' keys. The second line holds the choices
with what they mean, so that they can be carried over to another problem.

Two problems are near when they share many keys. The share is estimated from *bottom-k sketches*: the k least hashes of
either set of keys; of the k least of both together, the share that is in both sketches is an unbiased estimate of the
Jaccard index (Cohen and Kaplan, Summarizing data using bottom-k sketches, 2007).

Files appear whole or not at all, and reading takes no lock, so that any number of processes may share a folder. What
cannot be read is reported by a warning and removed. When the files together exceed the limit, the longest unused go.
"""

import collections
import dataclasses
import gzip
import hashlib
import json
import math
import os
import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Sequence

import platformdirs

from autoshard.errors import FileFormatError
from autoshard.files import write_bytes_atomically
from autoshard.interrupts import StopRequest, stop_on_signals
from autoshard.solver.driver import solve
from autoshard.solver.evaluate import evaluate
from autoshard.solver.io.packed import problem_digest
from autoshard.solver.options import Progress, SolverOptions
from autoshard.solver.problem import CapacityPrice, Certificate, Problem, Solution, Status
from autoshard.solver.search import ROUNDING, relative_gap

VARIABLE = "AUTOSHARD_CACHE"
"""Environment variable: a folder to use instead of the user's cache folder, or `off`."""
FORMAT, VERSION = "autoshard-cached-solution", 1
MAX_BYTES = 256 << 20
"""Size of the folder above which the longest unused entries are removed."""
SKETCH = 128
"""Hashes kept of a problem's keys."""
NEAR = 0.15
"""Share of keys in common from which on a solution is worth carrying over."""
LOOKED_AT = 400
"""Most entries, the latest used first, among which the nearest is sought."""
ABOUT_AS_LONG = 0.9
"""A search that had this share of the time that is allowed now need not be repeated."""
_SUFFIX = ".json.gz"


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """What the nodes of a problem are and what their choices mean, beyond one problem.

    Attributes:
      keys: For each node, a text that the node of the same role has in a similar problem (another batch size, one layer
        more), such as the path of an argument.
      meanings: For each node, a text for each choice, such as a layout. Nodes may share one tuple.
    """

    keys: tuple[str, ...]
    meanings: tuple[tuple[str, ...], ...]


def plain_labels(problem: Problem) -> Labels:
    """Labels for a problem of which nothing is known: names and numbers."""
    numbers = {len(node.costs): tuple(map(str, range(len(node.costs)))) for node in problem.nodes}
    return Labels(
        tuple(f"{node.name} of {len(node.costs)}" for node in problem.nodes),
        tuple(numbers[len(node.costs)] for node in problem.nodes),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A solution as stored: its certificate, its choices, and the key and meaning at each node.

    Attributes:
      limit_s: The time limit it was sought under; what was used of it if the user stopped the search, or if the gap
        wanted then was reached.
    """

    solution: Solution
    limit_s: float
    keys: tuple[str, ...]
    meanings: tuple[str, ...]


class SolutionCache:
    """The entries in one folder, which is made when the first is stored."""

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> None:
        self.folder, self.max_bytes = pathlib.Path(folder), max_bytes

    def find(self, digest: str) -> Entry | None:
        """The entry of a problem."""
        entry = self._read(self._path(digest))
        if entry is not None:
            self._touch(self._path(digest))
        return entry

    def nearest(self, problem: Problem, labels: Labels) -> tuple[int, ...] | None:
        """Choices for `problem` carried over from the stored solution that is nearest to it; None if none is near.

        They may break the problem's limits.
        """
        own, best, found = _sketch(labels.keys), 0.0, None
        for path in self._paths()[:LOOKED_AT]:
            header = self._read_header(path)
            if header is not None:
                # Of two that share as many keys, the one of the nearer size.
                size = min(header["nodes"], len(labels.keys)) / max(header["nodes"], len(labels.keys), 1)
                share = _overlap(own, header["sketch"]) + 1e-3 * size
                if share > max(best, NEAR):
                    best, found = share, path
        entry = None if found is None else self._read(found)
        if found is None or entry is None:
            return None
        self._touch(found)
        return carried_over(entry, problem, labels)

    def store(self, digest: str, labels: Labels, solution: Solution, limit_s: float) -> None:
        """Stores a solution; one that is there already is replaced."""
        certificate, choices, price = solution.certificate, solution.chosen, solution.certificate.capacity_price
        header = {
            "format": FORMAT,
            "version": VERSION,
            "nodes": len(choices),
            "sketch": _sketch(labels.keys),
            "status": certificate.status.value,
            "objective": certificate.objective,
            "bound": certificate.bound if math.isfinite(certificate.bound) else None,
            "capacity_price": None if price is None else [price.bound, price.per_unit],
            "solve_s": certificate.solve_s,
            "limit_s": limit_s if math.isfinite(limit_s) else None,
        }
        meanings = [own[choice] for own, choice in zip(labels.meanings, choices, strict=True)]
        body = {"choices": list(choices), "keys": _interned(labels.keys), "meanings": _interned(meanings)}
        content = gzip.compress(f"{json.dumps(header)}\n{json.dumps(body)}\n".encode(), compresslevel=3)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes_atomically(self._path(digest), content)
            self._shrink()
        except (OSError, FileFormatError) as error:
            warnings.warn(f"The solution is not kept in the cache {self.folder}: {error}", stacklevel=2)

    def _path(self, digest: str) -> pathlib.Path:
        return self.folder / f"{digest}{_SUFFIX}"

    def _paths(self) -> list[pathlib.Path]:
        """The entries, the latest used first."""
        found = []
        try:
            with os.scandir(self.folder) as items:
                for item in items:
                    if item.name.endswith(_SUFFIX):
                        found.append((item.stat().st_mtime_ns, item.path))
        except OSError:  # no folder yet, or an entry that another process has just removed
            pass
        return [pathlib.Path(path) for _, path in sorted(found, reverse=True)]

    def _shrink(self) -> None:
        total = 0
        for place, path in enumerate(self._paths()):
            try:
                total += path.stat().st_size
                if total > self.max_bytes and place:
                    path.unlink()
            except OSError:  # another process was faster
                pass

    def _touch(self, path: pathlib.Path) -> None:
        try:
            os.utime(path)
        except OSError:  # a folder that may only be read
            pass

    def _read_header(self, path: pathlib.Path) -> dict | None:
        with _Reading(path):
            with gzip.open(path, "rb") as file:
                return _checked_header(file.readline())
        return None

    def _read(self, path: pathlib.Path) -> Entry | None:
        with _Reading(path):
            with gzip.open(path, "rb") as file:
                header, body = _checked_header(file.readline()), json.loads(file.read())
            bound = -math.inf if header["bound"] is None else float(header["bound"])
            certificate = Certificate(
                Status(header["status"]),
                float(header["objective"]),
                bound,
                relative_gap(float(header["objective"]), bound),
                float(header["solve_s"]),
                None if header["capacity_price"] is None else CapacityPrice(*map(float, header["capacity_price"])),
            )
            limit_s = math.inf if header["limit_s"] is None else float(header["limit_s"])
            keys, meanings = (tuple(texts[k] for k in numbers) for texts, numbers in (body["keys"], body["meanings"]))
            choices = tuple(int(choice) for choice in body["choices"])
            if not len(choices) == len(keys) == len(meanings) == header["nodes"]:
                raise ValueError("its parts have different lengths")
            return Entry(Solution(choices, certificate), limit_s, keys, meanings)
        return None


class _Reading:
    """Turns whatever a damaged entry raises into a warning, and removes the entry."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, FileNotFoundError):
            return True
        if not isinstance(error, OSError | EOFError | zlib.error | LookupError | TypeError | ValueError):
            return False
        warnings.warn(f"The cached solution {self.path} cannot be read and is ignored: {error}", stacklevel=3)
        try:
            self.path.unlink()
        except OSError:  # it is reported again next time
            pass
        return True


def default_cache() -> SolutionCache | None:
    """The user's cache: the folder named by `AUTOSHARD_CACHE`, or the system's usual place; None if that says `off`."""
    setting = os.environ.get(VARIABLE, "")
    if setting.strip().lower() == "off":
        return None
    return SolutionCache(setting or platformdirs.user_cache_path("autoshard", appauthor=False) / "solutions")


def solve_cached(
    problem: Problem,
    options: SolverOptions,
    cache: SolutionCache | None,
    labels: Callable[[], Labels] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    stop: StopRequest | None = None,
    hint: Sequence[int] | None = None,
) -> Solution:
    """`solve` that asks `cache` first, and stores what it finds.

    A stored solution is the answer if its proven gap is at most the wanted one, or if it was sought for as long as
    `options` allow. Otherwise the search starts from it, or from the nearest one, and keeps its bound. With a work
    limit the cache is not used: what others solved before must not change the answer.

    Args:
      problem, options, on_progress, stop, hint: As for `solve`. A stored solution that is better than the hint takes
        its place.
      cache: None for none.
      labels: Makes the labels of nodes and choices; by default they go by names and numbers.
    """
    if cache is None or options.work_limit is not None:
        return solve(problem, options, hint, on_progress, stop)
    digest = problem_digest(problem)
    stored = _trusted(cache.find(digest), problem)
    if stored is not None:
        wanted = max(options.relative_gap, ROUNDING)
        certificate = stored.solution.certificate
        if certificate.gap <= wanted or stored.limit_s >= ABOUT_AS_LONG * options.time_limit_s:
            status = Status.OPTIMAL if certificate.gap <= wanted else Status.FEASIBLE
            if on_progress is not None:
                on_progress(Progress(0.0, certificate.objective, certificate.bound, "from the cache"))
            return dataclasses.replace(stored.solution, certificate=dataclasses.replace(certificate, status=status))
        hint = _better(problem, hint, stored.solution)
    own = plain_labels(problem) if labels is None else labels()
    if hint is None:
        hint = cache.nearest(problem, own)
    if stop is None:
        with stop_on_signals() as stop:
            found = solve(problem, options, hint, on_progress, stop)
    else:
        found = solve(problem, options, hint, on_progress, stop)
    if stored is not None:
        found = _with_bound(found, stored.solution.certificate.bound, max(options.relative_gap, ROUNDING))
    if found.choices is not None:
        ended_early = stop.requested or found.certificate.status is Status.OPTIMAL
        limit_s = found.certificate.solve_s if ended_early else options.time_limit_s
        cache.store(digest, own, found, limit_s)
    return found


def _better(problem: Problem, hint: Sequence[int] | None, stored: Solution) -> Sequence[int]:
    """The better of a hint and a stored solution."""
    if hint is None:
        return stored.chosen
    given = evaluate(problem, hint)
    return hint if given.feasible and given.objective < stored.certificate.objective else stored.chosen


def carried_over(entry: Entry, problem: Problem, labels: Labels) -> tuple[int, ...]:
    """The choices of `entry` for another problem: by key, by the key's pattern, or else the cheapest choice."""
    by_key = dict(zip(entry.keys, entry.meanings, strict=True))
    by_pattern: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for key, meaning in by_key.items():
        by_pattern[_pattern(key)][meaning] += 1
    usual = {pattern: [meaning for meaning, _ in counts.most_common()] for pattern, counts in by_pattern.items()}
    places: dict[int, dict[str, int]] = {}
    choices = []
    for node, key, meanings in zip(problem.nodes, labels.keys, labels.meanings, strict=True):
        place = places.get(id(meanings))
        if place is None:
            place = places[id(meanings)] = {meaning: k for k, meaning in enumerate(meanings)}
        wanted = (by_key[key],) if key in by_key else ()
        known = next((place[m] for m in (*wanted, *usual.get(_pattern(key), ())) if m in place), None)
        choices.append(int(node.costs.argmin()) if known is None else known)
    return tuple(choices)


def _pattern(key: str) -> str:
    """A key without its numbers."""
    return re.sub(r"\d+", "*", key)


def _trusted(entry: Entry | None, problem: Problem) -> Entry | None:
    """The entry if its choices are what it says; its problem may have been written by anyone."""
    if entry is None:
        return None
    certificate, choices = entry.solution.certificate, entry.solution.chosen
    if len(choices) == len(problem.nodes) and all(
        0 <= k < len(node.costs) for k, node in zip(choices, problem.nodes, strict=True)
    ):
        result = evaluate(problem, choices)
        if result.feasible and math.isclose(result.objective, certificate.objective, rel_tol=1e-9, abs_tol=1e-300):
            return entry
    warnings.warn("A cached solution does not solve its problem and is ignored.", stacklevel=3)
    return None


def _with_bound(solution: Solution, bound: float, wanted_gap: float) -> Solution:
    """The solution with a bound that was proven before, if that is the better one."""
    certificate = solution.certificate
    if bound <= certificate.bound or solution.choices is None:
        return solution
    bound = min(bound, certificate.objective)
    gap = relative_gap(certificate.objective, bound)
    status = Status.OPTIMAL if gap <= wanted_gap else Status.FEASIBLE
    return Solution(solution.choices, dataclasses.replace(certificate, status=status, bound=bound, gap=gap))


def _checked_header(line: bytes) -> dict:
    header = json.loads(line)
    if header["format"] != FORMAT or header["version"] != VERSION:
        raise ValueError("it is of another version")
    if not isinstance(header["nodes"], int) or not all(isinstance(value, int) for value in header["sketch"]):
        raise ValueError("its header is malformed")
    return header


def _sketch(keys: Sequence[str]) -> list[int]:
    """The `SKETCH` least 64-bit hashes of the distinct keys, in order."""
    hashes = {int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") for key in set(keys)}
    return sorted(hashes)[:SKETCH]


def _overlap(one: Sequence[int], other: Sequence[int]) -> float:
    """Estimate of the Jaccard index of two sets of keys from their sketches."""
    union = sorted({*one, *other})[:SKETCH]
    both = set(one).intersection(other)
    return sum(value in both for value in union) / max(len(union), 1)


def _interned(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The distinct texts, and the number of each."""
    numbers = {text: k for k, text in enumerate(dict.fromkeys(texts))}
    return list(numbers), [numbers[text] for text in texts]
