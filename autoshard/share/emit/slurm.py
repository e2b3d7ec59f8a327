"""A decision for Slurm: for each pending job its priority, size and kind of nodes, as `scontrol` takes them."""

import shlex
from collections.abc import Sequence

from autoshard.share.emit.ranking import Ranked

_HEADER = """\
#!/bin/bash
# For Slurm: made by `autoshard share --emit slurm`. Sets priority, size and kind of nodes of pending jobs by their
# names; running jobs keep what they have. Priorities need the rights of an operator. Nodes need a feature with the name
# of their group in the cluster file.
set -u

set_job() {  # name, then what scontrol is told
    local name=$1 id
    shift
    for id in $(squeue --noheader --states=PENDING --name="$name" --format=%i); do
        scontrol update JobId="$id" "$@"
    done
}

"""


def slurm_text(ranked: Sequence[Ranked]) -> str:
    """The script: a line for each job, the most important first; those that wait are held."""
    return _HEADER + "".join(f"{_line(one)}\n" for one in ranked)


def _line(one: Ranked) -> str:
    words = ["set_job", one.name]
    if one.footprint is None:
        return shlex.join([*words, "Priority=0"]) + "  # held: it waits"
    nodes = sum(part.num_nodes for part in one.footprint.parts)
    several = len(one.footprint.parts) > 1
    kinds = "&".join(f"{part.group}*{part.num_nodes}" if several else part.group for part in one.footprint.parts)
    features = f"[{kinds}]" if several else kinds
    words += [f"Priority={one.priority}", f"NumNodes={nodes}", f"Features={features}"]
    words.append(f"TresPerNode=gres/gpu:{one.footprint.parts[0].devices_per_node}")
    return shlex.join(words)
