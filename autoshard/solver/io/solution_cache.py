"""Solutions kept on disk: an unchanged problem is answered at once, a changed one starts from the nearest solved one.

One file a problem, named by the problem's digest (`packed.py`): gzip-compressed JSON, two lines. The first line is what
a search for the nearest needs: sizes, certificate, and a sketch of the nodes' keys. The second line holds the choices
with what they mean, so that they can be carried over to another problem.

Files appear whole or not at all, and reading takes no lock, so that any number of processes may share a folder. What
cannot be read is reported by a warning and removed. When the files together exceed the limit, the longest unused go.
"""

import contextlib
import dataclasses
import gzip
import json
import math
import os
import pathlib
import warnings
import zlib
from collections.abc import Iterator, Sequence

from autoshard.errors import FileFormatError
from autoshard.files import write_bytes_atomically
from autoshard.solver.io.problem_keys import ProblemKeys, carried_over, overlap, sketch
from autoshard.solver.problem import CapacityPrice, Certificate, Problem, Relaxed, Solution, Status, relative_gap
from autoshard.user_cache import user_cache

FORMAT, VERSION = "autoshard-cached-solution", 1
MAX_BYTES = 256 << 20
"""Size of the folder above which the longest unused entries are removed."""
NEAR = 0.15
"""Share of keys in common from which on a solution is worth carrying over."""
LOOKED_AT = 400
"""Most entries, the latest used first, among which the nearest is sought."""
_SUFFIX = ".json.gz"


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A solution as stored: its certificate, its choices, and the keys of each node and of the choice that it took.

    One without choices has relaxed ones, the first of which stand for them.

    Attributes:
      limit_s: The time limit it was sought under; what was used of it if the user stopped the search, or if the gap
        wanted then was reached.
    """

    solution: Solution
    limit_s: float
    nodes: tuple[str, ...]
    chosen: tuple[str, ...]


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

    def nearest(self, problem: Problem, keys: ProblemKeys) -> tuple[int, ...] | None:
        """Choices for `problem` carried over from the stored solution that is nearest to it; None if none is near.

        They may break the problem's limits.
        """
        own, best, found = sketch(keys.nodes), 0.0, None
        for path in self._paths()[:LOOKED_AT]:
            header = self._read_header(path)
            if header is not None:
                # Of two that share as many keys, the one of the nearer size.
                size = min(header["nodes"], len(keys.nodes)) / max(header["nodes"], len(keys.nodes), 1)
                share = overlap(own, header["sketch"]) + 1e-3 * size
                if share > max(best, NEAR):
                    best, found = share, path
        entry = None if found is None else self._read(found)
        if found is None or entry is None:
            return None
        self._touch(found)
        return carried_over(entry.nodes, entry.chosen, problem, keys)

    def store(self, digest: str, keys: ProblemKeys, solution: Solution, limit_s: float) -> None:
        """Stores a solution; one that is there already is replaced."""
        certificate, price = solution.certificate, solution.certificate.capacity_price
        relaxed, choices = solution.relaxed, solution.choices
        if choices is None and relaxed is not None:
            choices = relaxed.choices[0]
        assert choices is not None, certificate.status
        header = {
            "format": FORMAT,
            "version": VERSION,
            "nodes": len(choices),
            "sketch": sketch(keys.nodes),
            "status": certificate.status.value,
            "objective": certificate.objective if math.isfinite(certificate.objective) else None,
            "bound": certificate.bound if math.isfinite(certificate.bound) else None,
            "capacity_price": None if price is None else [price.bound, price.per_unit],
            "solve_s": certificate.solve_s,
            "limit_s": limit_s if math.isfinite(limit_s) else None,
        }
        chosen = [own[choice] for own, choice in zip(keys.choices, choices, strict=True)]
        body = {
            "choices": list(choices),
            "relaxed": None if relaxed is None else [relaxed.choices, list(relaxed.prices.items())],
            "keys": _interned(keys.nodes),
            "meanings": _interned(chosen),
        }
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
        with _ignoring_damage(path), gzip.open(path, "rb") as file:
            return _checked_header(file.readline())
        return None

    def _read(self, path: pathlib.Path) -> Entry | None:
        with _ignoring_damage(path):
            with gzip.open(path, "rb") as file:
                header, body = _checked_header(file.readline()), json.loads(file.read())
            bound = -math.inf if header["bound"] is None else float(header["bound"])
            objective = math.inf if header["objective"] is None else float(header["objective"])
            certificate = Certificate(
                Status(header["status"]),
                objective,
                bound,
                relative_gap(objective, bound),
                float(header["solve_s"]),
                None if header["capacity_price"] is None else CapacityPrice(*map(float, header["capacity_price"])),
            )
            limit_s = math.inf if header["limit_s"] is None else float(header["limit_s"])
            nodes, chosen = (tuple(texts[k] for k in numbers) for texts, numbers in (body["keys"], body["meanings"]))
            choices = tuple(int(choice) for choice in body["choices"])
            if not len(choices) == len(nodes) == len(chosen) == header["nodes"]:
                raise ValueError("its parts have different lengths")
            relaxed = None
            if body.get("relaxed") is not None:
                every, prices = body["relaxed"]
                every = tuple(tuple(int(choice) for choice in own) for own in every)
                relaxed = Relaxed(every, {int(instant): float(price) for instant, price in prices})
            found = None if certificate.status is Status.UNKNOWN else choices
            return Entry(Solution(found, certificate, relaxed), limit_s, nodes, chosen)
        return None


@contextlib.contextmanager
def _ignoring_damage(path: pathlib.Path) -> Iterator[None]:
    """Turns whatever a damaged entry raises into a warning, and removes the entry."""
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, EOFError, zlib.error, LookupError, TypeError, ValueError) as error:
        warnings.warn(f"The cached solution {path} cannot be read and is ignored: {error}", stacklevel=4)
        with contextlib.suppress(OSError):  # it is reported again next time
            path.unlink()


def default_cache() -> SolutionCache | None:
    """The user's cache: the folder named by `AUTOSHARD_CACHE`, or the system's usual place; None if that says `off`."""
    folder = user_cache("solutions")
    return None if folder is None else SolutionCache(folder)


def _checked_header(line: bytes) -> dict:
    header = json.loads(line)
    if header["format"] != FORMAT or header["version"] != VERSION:
        raise ValueError("it is of another version")
    if not isinstance(header["nodes"], int) or not all(isinstance(value, int) for value in header["sketch"]):
        raise ValueError("its header is malformed")
    return header


def _interned(texts: Sequence[str]) -> tuple[list[str], list[int]]:
    """The distinct texts, and the number of each."""
    numbers = {text: k for k, text in enumerate(dict.fromkeys(texts))}
    return list(numbers), [numbers[text] for text in texts]
