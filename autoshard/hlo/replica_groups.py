"""Which devices take part in a collective together, and which mesh axes that makes.

HLO writes groups in three ways: listed, `{{0,1},{2,3}}`; as a transposed iota, `[4,2]<=[2,4]T(1,0)`; and as axes of a
mesh of the compiler's own, `mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}`, of which an axis may be a part,
`'a':(2)4` (OpenXLA, xla/hlo/ir/replica_group.h and mesh_and_axis.h).
"""

import re
from collections.abc import Sequence

import numpy as np

from autoshard.errors import VerificationError

_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_LISTED = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_MESH = re.compile(
    r"replica_groups=@?\w*mesh\[([^\]]*)\](?:,\s*device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?\s*\{([^}]*)\}"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PART = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str, num_devices: int) -> np.ndarray:
    """The groups that the attributes of a collective name; int [groups, devices in each].

    Raises:
      VerificationError: They are written in a way that is not known.
    """
    if found := _IOTA.search(attributes):
        groups, size, dims, order = found.groups()
        return _iota(dims, order).reshape(int(groups), int(size))
    if found := _MESH.search(attributes):
        return _of_mesh(*found.groups())
    if found := _LISTED.search(attributes):
        listed = [[int(n) for n in row.split(",") if n] for row in re.findall(r"\{([\d,]*)\}", found.group(1))]
        return np.array(listed) if listed else np.arange(num_devices).reshape(1, -1)
    raise VerificationError(
        "A collective names its groups of devices in one of the three ways that HLO has; received "
        f"{attributes[:200]!r}. This version of XLA may print them in another way."
    )


def _iota(dims: str, order: str | None) -> np.ndarray:
    sizes = _numbers(dims)
    ids = np.arange(int(np.prod(sizes))).reshape(sizes)
    return ids.transpose(_numbers(order)).reshape(-1) if order else ids.reshape(-1)


def _of_mesh(axes: str, dims: str | None, order: str | None, chosen: str) -> np.ndarray:
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = _iota(dims, order) if dims else np.arange(int(np.prod(list(sizes.values()))))
    shape, inside = [], []  # the mesh with axes split where only a part of one takes part
    parts = {name: (int(before), int(size)) for name, before, size in _PART.findall(chosen) if size}
    whole = {name for name, _, size in _PART.findall(chosen) if not size}
    for name, size in sizes.items():
        if name in parts:
            before, own = parts[name]
            shape += [before, own, size // before // own]
            inside.append(len(shape) - 2)
        else:
            shape.append(size)
            if name in whole:
                inside.append(len(shape) - 1)
    outside = [k for k in range(len(shape)) if k not in inside]
    group_size = int(np.prod([shape[k] for k in inside]))
    return ids.reshape(shape).transpose([*outside, *inside]).reshape(-1, group_size)


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]


def source_target_pairs(attributes: str) -> np.ndarray:
    """Who sends to whom in a permutation, those who send to themselves left out; int [pairs, 2]."""
    found = _PAIRS.search(attributes)
    if found is None:
        raise VerificationError(f"A collective-permute lists its pairs of devices; received {attributes[:200]!r}.")
    pairs = np.array([_numbers(p) for p in re.findall(r"\{(\d+,\d+)\}", found.group(1))], int).reshape(-1, 2)
    return pairs[pairs[:, 0] != pairs[:, 1]]


def axes_of(groups: np.ndarray, shape: Sequence[int]) -> tuple[int, ...]:
    """The mesh axes along which the devices of a group differ; devices are numbered row-major over `shape`."""
    coordinates = np.stack(np.unravel_index(groups, tuple(shape)), axis=-1)
    differs = (coordinates != coordinates[:, :1]).any(axis=(0, 1))
    return tuple(int(a) for a in np.flatnonzero(differs))
