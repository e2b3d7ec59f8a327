"""What the workers of one generation agree on without a collective: barriers with a limit, and small texts.

JAX's coordination service has both, but its client is not public: `multihost_utils.sync_global_devices` waits without
limit and does not tell who is missing, and `reached_preemption_sync_point` starts from SIGTERM alone. So this is the
one file that uses `jax._src.distributed.global_state.client`, as Orbax does; its methods are the same from jax 0.10.1
to 0.12.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

from autoshard.errors import ElasticError, TrainingError

DECISION_TIMEOUT_S = 24 * 3600.0
"""How long a decision may take, which may be a plan of a large program; the supervisor knows better, and ends the
generation sooner."""

_DECIDED, _FAILED = "decided:", "failed"


class Coordination:
    """The coordination service of a generation; without one, of a single process."""

    def __init__(self, client: Any | None):
        """Args:
        client: JAX's client; None for a single process.
        """
        self._client = client
        self._own: dict[str, str] = {}
        self._num_decisions = 0

    @staticmethod
    def of_this_process() -> "Coordination":
        """That of `jax.distributed`, if it was initialised."""
        return Coordination(distributed.global_state.client)

    @property
    def is_single(self) -> bool:
        """Whether there is one process only."""
        return self._client is None

    def put_once(self, key: str, value: str) -> None:
        """Writes `value` for all to see, unless another was written before."""
        if self._client is None:
            self._own.setdefault(key, value)
            return
        try:
            self._client.key_value_set(key, value, allow_overwrite=False)
        except Exception as error:  # JaxRuntimeError of the status ALREADY_EXISTS
            if "ALREADY_EXISTS" not in str(error):
                raise

    def get(self, key: str) -> str | None:
        """What was written, or None."""
        if self._client is None:
            return self._own.get(key)
        try:
            return self._client.key_value_try_get(key)
        except Exception as error:  # JaxRuntimeError of the status NOT_FOUND
            if "NOT_FOUND" not in str(error):
                raise
            return None

    def decided_by_the_first(self, decide: Callable[[], str]) -> str:
        """The text that `decide` gives in the first process, in all of them; the others do not call it.

        Raises:
            TrainingError: in the others, if it failed in the first.
        """
        if self._client is None:
            return decide()
        self._num_decisions += 1
        key = f"autoshard/decision/{self._num_decisions}"
        if jax.process_index() == 0:
            try:
                text = decide()
            except BaseException:
                self.put_once(key, _FAILED)
                raise
            self.put_once(key, _DECIDED + text)
            return text
        text = self._client.blocking_key_value_get(key, math.ceil(DECISION_TIMEOUT_S * 1e3))
        if text == _FAILED:
            raise TrainingError("The first process of this run ended with an error. Its own output tells which.")
        return text.removeprefix(_DECIDED)

    def barrier(self, name: str, timeout_s: float) -> None:
        """Waits until all have come here.

        Args:
            name: tells this barrier from all others of the generation.
            timeout_s: how long to wait.

        Raises:
            ElasticError: somebody is missing; the message tells who.
        """
        if self._client is None:
            return
        try:
            self._client.wait_at_barrier(name, math.ceil(timeout_s * 1e3))
        except Exception as error:  # JaxRuntimeError, of the statuses DEADLINE_EXCEEDED or UNAVAILABLE
            raise ElasticError(
                f"barrier `{name}`: all workers must come within {timeout_s:g} s; some did not: {error}"
            ) from error
