"""Problem files: how a problem travels to a machine that has neither JAX nor the model.

The format `autoshard-problem`, version 1, is a NumPy archive (.npz: a zip of .npy arrays, deflated, never pickled):

    header       uint8, the UTF-8 bytes of a JSON object:
                   format         "autoshard-problem"
                   version        1
                   title          what the problem is, for people
                   capacity       a number, or null where nothing limits usage
                   names          the name of each node
                   instant_texts  distinct texts, for people, of what runs at an instant
    instants     int32 [T]; for each instant an index into `instant_texts`; empty where unknown
    values, value_start, value_shape, classes, class_start, nodes, edges, usages, edge_usages
                 as described in `packed.py`; +inf in `values` means forbidden

`read_problem_file` also takes instances of the ASPLOS/EuroSys 2025 contest (`iopddl.py`), plain or compressed by gzip;
what a file is, its first bytes tell.
"""

import dataclasses
import io
import json
import os
import zipfile

import numpy as np

from autoshard.errors import FileFormatError, SolverError
from autoshard.files import write_bytes_atomically
from autoshard.solver.io.iopddl import read_iopddl
from autoshard.solver.io.packed import Packed, pack, unpack
from autoshard.solver.problem import Problem
from autoshard.solver.validate import check_problem

FORMAT, VERSION = "autoshard-problem", 1
MAX_BYTES = 8 << 30
"""Largest size of a file's arrays once inflated."""
_ZIP = b"PK\x03\x04"
_DTYPES = {
    "values": np.float64, "value_start": np.int64, "value_shape": np.int32, "classes": np.int32,
    "class_start": np.int64, "nodes": np.int32, "edges": np.int32, "usages": np.int64, "edge_usages": np.int64,
}  # fmt: skip
_COLUMNS = {"value_shape": 2, "edges": 5, "usages": 4, "edge_usages": 4}


@dataclasses.dataclass(frozen=True, slots=True)
class ProblemFile:
    """What a problem file holds.

    Attributes:
      problem: The problem.
      title: What it is, for people; empty for an instance of the contest.
      instants: What runs at each instant, for people; empty where unknown.
    """

    problem: Problem
    title: str = ""
    instants: tuple[str, ...] = ()


def write_problem_file(file: ProblemFile, path: str | os.PathLike[str]) -> None:
    """Writes `file` to `path`; it appears whole or not at all.

    Raises:
      FileFormatError: if it cannot be written.
    """
    packed = pack(file.problem)
    texts = {text: k for k, text in enumerate(dict.fromkeys(file.instants))}
    header = {
        "format": FORMAT,
        "version": VERSION,
        "title": file.title,
        "capacity": packed.capacity,
        "names": [node.name for node in file.problem.nodes],
        "instant_texts": list(texts),
    }
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        header=np.frombuffer(json.dumps(header).encode(), np.uint8),
        instants=np.array([texts[text] for text in file.instants], np.int32),
        **{name: getattr(packed, name) for name in _DTYPES},
    )
    write_bytes_atomically(path, buffer.getvalue())


def read_problem_file(path: str | os.PathLike[str]) -> ProblemFile:
    """Reads a problem file, or an instance of the contest.

    Raises:
      FileFormatError: if the file is missing, malformed, of another version, or contradicts itself.
    """
    path = os.fspath(path)
    try:
        with open(path, "rb") as file:
            is_ours = file.read(len(_ZIP)) == _ZIP
    except OSError as error:
        raise FileFormatError(f"{path}: the file cannot be read: {error.strerror}. Check the path.") from error
    result = _read_own(path) if is_ours else ProblemFile(read_iopddl(path))
    try:
        check_problem(result.problem)
    except SolverError as error:
        raise FileFormatError(f"{path}: the problem contradicts itself: {error}.") from error
    return result


def _read_own(path: str) -> ProblemFile:
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
        if size > MAX_BYTES:
            raise ValueError(f"its arrays may take {MAX_BYTES} bytes; they take {size}")
        with np.load(path, allow_pickle=False) as arrays:
            header = json.loads(arrays["header"].tobytes())
            if header["format"] != FORMAT:
                raise ValueError("it is another kind of archive")
            if header["version"] != VERSION:
                raise FileFormatError(
                    f"{path}: this is a problem of version {header['version']!r}; this autoshard reads version "
                    f"{VERSION}. Write it anew with `autoshard plan --problem-only`."
                )
            found = {name: _checked(arrays[name], name) for name in _DTYPES}
            instants = arrays["instants"].tolist()
        capacity = None if header["capacity"] is None else float(header["capacity"])
        problem = unpack(Packed(capacity, **found), [str(name) for name in header["names"]])
        texts = [str(text) for text in header["instant_texts"]]
        return ProblemFile(problem, str(header["title"]), tuple(texts[k] for k in instants))
    except FileFormatError:
        raise
    except Exception as error:  # zip, deflate, NumPy and JSON have a dozen ways to say that a file is damaged
        raise FileFormatError(
            f"{path}: this is not a problem file of autoshard: {type(error).__name__}: {error}. Write one with "
            "`autoshard plan --problem-only`."
        ) from error


def _checked(array: np.ndarray, name: str) -> np.ndarray:
    columns = _COLUMNS.get(name)
    if array.dtype != _DTYPES[name] or (array.ndim != 1 if columns is None else array.shape[1:] != (columns,)):
        raise ValueError(f"the array {name} has type {array.dtype} and shape {array.shape}")
    return array
