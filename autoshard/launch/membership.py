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

    @property
    def wanted(self) -> int:
        """The number of workers that the user wants, if there are slots for so many."""
        return self._wanted

    def want(self, workers: int) -> None:
        """The user wants another number of workers; slots whose workers were lost count again."""
        self._wanted = workers
        self._away_until_s.clear()

    def lost(self, slot: int, now_s: float) -> None:
        """The worker at a slot was lost."""
        if self._rejoin_after_s:
            self._away_until_s[slot] = now_s + self._rejoin_after_s

    def exclude(self, slot: int) -> None:
        """A slot is not to be used any more."""
        self._excluded.add(slot)

    def returning(self, now_s: float) -> tuple[int, ...]:
        """Slots whose time alone is over; each is told once."""
        back = tuple(slot for slot, until_s in self._away_until_s.items() if until_s <= now_s)
        for slot in back:
            del self._away_until_s[slot]
        return back

    def recall(self) -> bool:
        """Lets the slots that are left alone be used at once, since too few are left; whether there were any."""
        had = bool(self._away_until_s)
        self._away_until_s.clear()
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
