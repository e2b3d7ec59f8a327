"""What a plan of a configuration would make of slow devices, for `autoshard plan --slow`."""

from collections.abc import Sequence

from autoshard.api import BasePlan, Plan
from autoshard.balance.options import Balance
from autoshard.errors import ConfigError
from autoshard.plans.apply import argument_shapes, check
from autoshard.plans.balanced import platform_of
from autoshard.plans.slow_devices import Forecasts, batch_forecasts, forecasts, parse_slow
from autoshard.train.config import TrainConfig
from autoshard.train.registry import runs_in_stages
from autoshard.uneven_step import UnevenStep


def check_before_planning(config: TrainConfig, slow: Sequence[str]) -> None:
    """Refuses, before anything is planned, slow devices that are not written so, and steps that are cut into stages for
    certain.

    Args:
        config: what is planned. slow: `DEVICE:SLOWDOWN`, several by commas.

    Raises:
        ConfigError: it is one of these.
    """
    parse_slow(slow)
    if runs_in_stages(config):
        raise _not_one_program("is in stages")


def forecasts_of(plan: BasePlan, slow: Sequence[str]) -> Forecasts:
    """The step of a plan that was just made, with slow devices.

    Args:
        plan: the plan. slow: `DEVICE:SLOWDOWN`, several by commas.

    Raises:
        ConfigError: the devices are not written so, the plan is not of one program alone, or nothing in it can move.
    """
    devices = parse_slow(slow)
    if not isinstance(plan, Plan) or plan.kept_trace is None:
        raise _not_one_program("is in stages" if plan.is_staged else "has tables in host memory")
    fn = plan.kept_trace.fn
    graph = check(plan, fn, argument_shapes(plan)).graph
    if isinstance(fn, UnevenStep):
        return batch_forecasts(plan, graph, fn, devices)
    return forecasts(plan, graph, devices, Balance(absorbs=max(4.0, *devices.values(), 0.0)), platform_of(plan))


def _not_one_program(kind: str) -> ConfigError:
    return ConfigError(
        f"--slow: shares of a tensor axis are those of one program over one mesh; the plan {kind}. Plan again with the "
        "measured speeds as two kinds of devices in the cluster file: stages and batches are then uneven."
    )
