"""Which slots the next generation uses."""

from collections.abc import Mapping, Sequence

from autoshard.launch.engines.protocol import Slot


class Membership:
    """The slots that a run may use: those the engine offers, less those that are lost for a while or left out."""

    def __init__(self, least_workers: int, most_workers: int, rejoin_after_s: float):
        """Args:
        least_workers, most_workers: the run's size.
        rejoin_after_s: how long a slot is left alone after its worker was lost, where the size may change.
        """
        self._least, self._most = least_workers, most_workers
        self._rejoin_after_s = rejoin_after_s if least_workers < most_workers else 0.0
        self._wanted = most_workers
        self._away_until_s: dict[int, float] = {}
        self._excluded: set[int] = set()
        self._there: set[int] | None = None

    @property
    def wanted(self) -> int:
        """The number of workers that the user wants, if there are slots for so many."""
        return self._wanted

    def want(self, workers: int) -> None:
        """The user wants another number of workers; slots whose workers were lost count again."""
        self._wanted = workers
        self.recall()

    def lost(self, slot: int, now_s: float) -> None:
        """The worker at a slot was lost."""
        if self._rejoin_after_s:
            self._away_until_s[slot] = now_s + self._rejoin_after_s
            if self._there is not None:
                self._there.discard(slot)  # its time may be over before the next look, and it joins all the same

    def can_spare(self, slot: int, offered: Sequence[Slot]) -> bool:
        """Whether enough slots would be left without this one."""
        others = [s for s in offered if s.number != slot and s.number not in self._excluded]
        return self.is_enough(others)

    def exclude(self, slot: int) -> None:
        """A slot is not to be used any more."""
        self._excluded.add(slot)

    def joined(self, offered: Sequence[Slot], now_s: float) -> tuple[Slot, ...]:
        """Slots that the engine offers and did not at the last call, and those whose time alone is over; none at first.

        A slot whose host is gone is not among them, even when its time is over.
        """
        self._away_until_s = {slot: until_s for slot, until_s in self._away_until_s.items() if until_s > now_s}
        there = {slot.number for slot in offered} - self._away_until_s.keys()
        before, self._there = self._there, there
        return tuple(slot for slot in offered if slot.number in there - before) if before is not None else ()

    def recall(self) -> bool:
        """Lets the slots that are left alone be used at once, since too few are left; whether there were any."""
        had = bool(self._away_until_s)
        if self._there is not None:
            self._there |= self._away_until_s.keys()
        self._away_until_s = {}
        return had

    def usable(self, offered: Sequence[Slot]) -> tuple[Slot, ...]:
        """The slots of the next generation, as many as are wanted, in the engine's order; they may be too few."""
        free = [s for s in offered if s.number not in self._excluded and s.number not in self._away_until_s]
        return tuple(free[: self._wanted])

    def is_enough(self, slots: Sequence[Slot]) -> bool:
        """Whether a generation of these slots may run."""
        return len(slots) >= min(self._least, self._wanted)


def with_ranks_kept(slots: Sequence[Slot], before: Mapping[int, int]) -> tuple[Slot, ...]:
    """Slots in the order of their ranks: as many as possible keep the rank that they had.

    What a worker's host holds in memory then is what it needs again.

    Args:
        slots: those of the next generation.
        before: the rank of each slot in the last one, by number.
    """
    ranks: list[Slot | None] = [None] * len(slots)
    others = []
    for slot in slots:
        rank = before.get(slot.number, len(slots))
        if rank < len(slots) and ranks[rank] is None:
            ranks[rank] = slot
        else:
            others.append(slot)
    return tuple(slot if slot is not None else others.pop(0) for slot in ranks)
