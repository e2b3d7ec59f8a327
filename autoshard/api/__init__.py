"""Plans on devices: made and read, with all that can be done with them as methods."""

from autoshard.api.auto_jit import jit
from autoshard.api.base_plan import BasePlan
from autoshard.api.comparing import compare, diff
from autoshard.api.planning import in_stages, plan_on_devices
from autoshard.api.program import Plan
from autoshard.api.reading import load
from autoshard.api.staged import StagedPlan

__all__ = ["Plan", "BasePlan", "StagedPlan", "compare", "diff", "in_stages", "jit", "load", "plan_on_devices"]
