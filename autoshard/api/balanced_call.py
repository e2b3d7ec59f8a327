"""What `Plan.jit` returns when shares are asked for: the planned function, whose devices have shares."""

from collections.abc import Callable
from typing import Any

import jax

from autoshard.api.planned_call import PlannedCall
from autoshard.calls.pure_call import Statics
from autoshard.plans.balanced import BalancedFunction
from autoshard.plans.shares import Shares


class BalancedCall(PlannedCall):
    """A function that runs as its plan says, on devices with shares that can change; see `PlannedCall`.

    Attributes:
      balance: The shares: shows and sets them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        planned_fn: Callable[..., Any],
        statics: Statics,
        mesh: jax.sharding.Mesh,
        make: Callable[[Callable[..., Any]], BalancedFunction],
    ):
        """Args: As of `PlannedCall`."""
        self._latest: BalancedFunction | None = None

        def making(pure: Callable[..., Any]) -> Any:
            self._latest = make(pure)
            return self._latest

        super().__init__(fn, planned_fn, statics, mesh, making)
        self.balance = Shares(self._balanced)

    def _balanced(self) -> BalancedFunction:
        """The function that ran last; before it ran, as it was planned."""
        if self._latest is None:
            self._function(self._planned_fn)
        assert self._latest is not None
        return self._latest
