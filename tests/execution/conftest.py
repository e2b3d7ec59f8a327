"""Plans drawn at random: any vector of choices is a legal plan, however bad, and must run to the same result."""

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from autoshard import Plan
from autoshard.cluster import Cluster
from autoshard.planner.build import formulate
from autoshard.planner.program import prepare
from autoshard.plans.make import Origin, plan_of_choices
from autoshard.solver.problem import Certificate, Status
from autoshard.trace.trace import trace

CLUSTER = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml")


def _random_plan(
    fn: Callable[..., Any], args: Sequence[Any], mesh: dict[str, int], seed: int, donate: tuple[int, ...] = ()
) -> Plan:
    traced = trace(fn, args, donate)
    formulation = formulate(
        prepare(traced.graph), CLUSTER.slices()[0].logical_mesh(mesh), None, [None] * len(traced.graph.arguments)
    )
    rng = np.random.default_rng(seed)
    picks = tuple(int(rng.integers(len(node.costs))) for node in formulation.problem.nodes)
    certificate = Certificate(Status.FEASIBLE, 0.0, 0.0, 0.0, 0.0)
    origin = Origin("random", CLUSTER.name, donate)
    return Plan.of(plan_of_choices(traced, formulation, picks, origin=origin, certificate=certificate))


@pytest.fixture(scope="session")
def random_plan() -> Callable[..., Plan]:
    """(fn, args, mesh axes, seed, donate=()) -> a plan whose choices are drawn at random."""
    return _random_plan


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Eight CPU devices."""
    return CLUSTER
