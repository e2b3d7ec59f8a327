"""Verifies a saved plan for one target, in a process of its own: `python -m autoshard.train.verify_process`.

A compiler cannot be stopped within a process, may end it, and fixes what JAX makes of platforms. So `autoshard verify`
starts this module for every target. The request comes as JSON from the standard input; the stages go to the standard
output, a line each; the outcome goes to a file.
"""

import sys

import pydantic

from autoshard.errors import AutoshardError


class Request(pydantic.BaseModel):
    """What to verify.

    Attributes:
        plan: path of the plan file.
        configuration: the training configuration, as JSON.
        target: what to compile for; null for the plan's own device type.
        outcome: path of the file to write.
    """

    plan: str
    configuration: str
    target: str | None
    outcome: str


def main() -> None:
    """Reads a request and carries it out."""
    request = Request.model_validate_json(sys.stdin.read())
    import jax

    from autoshard.plans.plan import Plan
    from autoshard.train.config import config_of_text
    from autoshard.train.planning import arguments
    from autoshard.train.registry import train_functions
    from autoshard.verify.verification import Failure, Report
    from autoshard.verify.verify import verify

    say = lambda stage: print(stage, flush=True)
    say("building the model")
    plan = Plan.load(request.plan)
    jax.config.update("jax_num_cpu_devices", plan.num_devices)
    try:
        config = config_of_text(request.configuration, request.plan)
        functions = train_functions(config)
        found = verify(
            plan, functions.step, *arguments(config, functions), target=request.target, on_stage=say
        )  # the parent keeps the time limit
        report = Report((found,))
    except AutoshardError as error:
        report = Report((Failure(request.target or plan.device, str(error)),))
    report.save(request.outcome)


if __name__ == "__main__":
    main()
