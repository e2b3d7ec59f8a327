"""What a policy is."""

from typing import Protocol

from autoshard.share.situation import Decision, Situation


class Policy(Protocol):
    """Decides who gets which devices, each time that something happens."""

    @property
    def name(self) -> str:
        """For tables."""
        ...

    @property
    def round_s(self) -> float:
        """Least time between two decisions; 0 where it decides at every event."""
        ...

    def decide(self, situation: Situation) -> Decision:
        """Who runs where from now on."""
        ...
