"""XLA's fall-backs to full rematerialisation, from what the partitioner writes to its log.

Where the partitioner knows no way from one sharding to another it replicates the tensor on every device and cuts the
wanted part out of it, and says so in a warning (OpenXLA, xla/service/spmd/spmd_partitioner.cc).
"""

import re

from autoshard.hlo.collectives import equations_in
from autoshard.verify.figures import Rematerialisation
from autoshard.verify.strays import Origins

_WARNING = re.compile(r"from sharding (.+?) to (.+?) (?:efficiently|without) .*?HLO operation:? (.*)")
_ANY = re.compile(r"[Ii]nvoluntary full rematerialization")
_OPERATION = re.compile(r"%?([\w.\-]+) = (\w+\[[\d,]*\])")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def rematerialisations(log: str, origins: Origins) -> tuple[Rematerialisation, ...]:
    """The fall-backs that a compiler's log tells, each once."""
    found: dict[Rematerialisation, None] = {}
    for line in log.splitlines():
        if not _ANY.search(line):
            continue
        told = _WARNING.search(line)
        before, after, operation = told.groups() if told else ("", "", line)
        made, named = _OPERATION.search(operation), _OP_NAME.search(operation)
        op_name = named.group(1) if named else ""
        label = op_name.rpartition("/")[2] or (made.group(1) if made else operation[:120])
        equations = equations_in(op_name)
        found[Rematerialisation(label, origins.source(equations), made.group(2) if made else "", before, after)] = None
    return tuple(found)
