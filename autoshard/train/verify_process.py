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
        program: the number of the program in the plan.
    """

    plan: str
    configuration: str
    target: str | None
    outcome: str
    program: int = 0


def main() -> None:
    """Reads a request and carries it out."""
    request = Request.model_validate_json(sys.stdin.read())
    import jax

    from autoshard.offloading.reading import load
    from autoshard.train.config import config_of_text
    from autoshard.train.planning import planned_program
    from autoshard.train.registry import functions_of
    from autoshard.verify.report import Failure, Report
    from autoshard.verify.verify import verify

    say = lambda stage: print(stage, flush=True)
    say("building the model")
    found = load(request.plan)
    plan = found.programs[request.program]
    jax.config.update("jax_num_cpu_devices", plan.num_devices)
    try:
        config = config_of_text(request.configuration, request.plan)
        functions = functions_of(config, found.is_staged)
        step, shapes = planned_program(config, functions, found, request.program)
        # the parent keeps the time limit
        report = Report((verify(plan, step, *shapes, target=request.target, on_stage=say),))
    except AutoshardError as error:
        report = Report((Failure(request.target or plan.device, str(error)),))
    report.save(request.outcome)


if __name__ == "__main__":
    main()
