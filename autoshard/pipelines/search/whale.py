"""Splittings without a search, to compare with and to begin from: even ones, and those of Whale.

Source: Jia et al., "Whale: Efficient Giant Model Training over Heterogeneous GPUs", USENIX ATC 2022, section 3.5 and
Algorithm 1: shares in proportion to peak speed, then moved away from devices whose memory does not suffice.
"""

from collections.abc import Sequence


def whale_shares(
    flops_per_s: Sequence[float], memory_bytes: Sequence[float], work_flops: float, work_bytes: float
) -> tuple[float, ...]:
    """Algorithm 1: shares of a piece of work for devices of unlike speed and memory.

    It assumes that memory grows in proportion to the share. As long as some devices lack memory and others are not set
    aside, the one that lacks most gives to the least busy one what that still has room for (at most what the giver
    lacks); a giver that now fits is done, and a taker that has no room is set aside.

    Args:
      flops_per_s, memory_bytes: Of each device.
      work_flops, work_bytes: Of the whole work.

    Returns:
      The share of each device; they add up to 1. Some may still not fit.
    """
    total = sum(flops_per_s)
    shares = [f / total for f in flops_per_s]
    most = [m / work_bytes if work_bytes else float("inf") for m in memory_bytes]
    lacking = {i for i, share in enumerate(shares) if share > most[i]}
    free = set(range(len(shares))) - lacking
    while lacking and free:
        peak = max(lacking, key=lambda i: (shares[i] / most[i] if most[i] else float("inf"), -i))
        valley = min(free, key=lambda i: (shares[i] * work_flops / flops_per_s[i], shares[i] / most[i], i))
        moved = min(shares[peak] - most[peak], most[valley] - shares[valley])
        if moved <= 0:
            free.remove(valley)
            continue
        if moved == shares[peak] - most[peak]:
            lacking.remove(peak)
            shares[peak] = most[peak]
        else:
            free.remove(valley)
            shares[peak] -= moved
        shares[valley] += moved
    return tuple(shares)


def even_cut(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Equally many layers in each stage, the first ones having one more: where each begins, and the end."""
    return tuple(num_layers // num_stages * s + min(s, num_layers % num_stages) for s in range(num_stages + 1))


def cut_by_shares(layer_flops: Sequence[float], shares: Sequence[float]) -> tuple[int, ...]:
    """Consecutive layers for each stage, whose part of all operations comes nearest to the stage's share.

    Args:
      layer_flops: Of each layer. shares: Of each stage; they add up to 1.

    Returns:
      Where each stage begins, and the end; each has at least one layer.
    """
    num_layers, num_stages = len(layer_flops), len(shares)
    sums = [0.0]
    for flops in layer_flops:
        sums.append(sums[-1] + flops)
    cut, wanted = [0], 0.0
    for s, share in enumerate(shares[:-1]):
        wanted += share * sums[-1]
        allowed = range(cut[-1] + 1, num_layers - (num_stages - s - 1) + 1)
        cut.append(min(allowed, key=lambda j: abs(sums[j] - wanted)))
    return (*cut, num_layers)
