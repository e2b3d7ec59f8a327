"""autoshard chooses how a JAX program is sharded over a cluster, proves how good the choice is, and runs it."""

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError
from autoshard.plans.make import plan
from autoshard.plans.options import PlanOptions, PlanProgress
from autoshard.plans.plan import Plan

__version__ = "0.1.0"

__all__ = ["AutoshardError", "Cluster", "Plan", "PlanOptions", "PlanProgress", "plan"]
