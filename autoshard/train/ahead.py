"""What a run needs whatever its devices: a worker that waits for its part in a run makes it meanwhile."""

import dataclasses

from autoshard_models.train_step import TrainFunctions

from autoshard.trace.trace import trace
from autoshard.train.config import StragglersSection, TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.planning import arguments
from autoshard.train.registry import load_data, runs_in_stages, staged_functions, whole_functions
from autoshard.train.work import model_flops


@dataclasses.dataclass(frozen=True, slots=True)
class Ahead:
    """The part of a run that is ready before its devices are known.

    Attributes:
        config: the run.
        whole: its functions for a step of one program, traced.
        data: its data.
    """

    config: TrainConfig
    whole: TrainFunctions
    data: TrainData

    def functions(self) -> TrainFunctions:
        """The functions of the run on the devices that are there now: in stages, where they are of several kinds."""
        if runs_in_stages(self.config):
            return staged_functions(self.config)
        return whole_functions(self.config) if self.config.stragglers.shares_batch else self.whole


def prepare_ahead(config: TrainConfig) -> Ahead:
    """Builds and traces the program of a run, and opens its data; no device is touched.

    Raises:
        ConfigError: an unknown name, settings that contradict each other, or data that cannot be read.
    """
    of_any_devices = config.model_copy(update={"stragglers": StragglersSection()})
    functions, data = whole_functions(of_any_devices), load_data(config)
    state, batch, *_ = arguments(of_any_devices, functions)
    trace(functions.step, (state, batch), (0,))
    model_flops(functions, state, batch)
    return Ahead(config, functions, data)
