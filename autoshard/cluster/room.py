"""Levels of several axes together, where more than one axis counts the same peers of a level.

Devices in an order that tears levels apart can have two axes that both cross the same two spines. A collective over
both axes crosses two spines, not four: what is too much at a level lies within it, at the next level inwards.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

from autoshard.cluster.mesh import AxisLevel


def within_room(levels: Sequence[AxisLevel]) -> list[AxisLevel]:
    """The levels of some axes together, none with more peers than there are; what has no room inwards stays."""
    shared = sorted((level for level in levels if level.most), key=lambda level: -level.link.level)
    by_link = [list(own) for _, own in itertools.groupby(shared, key=lambda level: level.link)]
    if all(math.prod(level.size for level in own) <= own[0].most for own in by_link):
        return list(levels)
    found = [level for level in levels if not level.most]
    carried = 1
    for n, own in enumerate(by_link):
        size, most = carried * math.prod(level.size for level in own), own[0].most
        carried = 1
        inner = by_link[n + 1] if n + 1 < len(by_link) else []
        left = inner[0].most // math.prod(level.size for level in inner) if inner else 0
        if size > most and size % most == 0 and left and left % (size // most) == 0:
            size, carried = most, size // most
        found.append(dataclasses.replace(own[0], size=size))
    return found
