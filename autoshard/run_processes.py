"""How the processes of a supervised run are told from others on their machine, and how a process is none of them."""

import os

RUN_VARIABLE = "AUTOSHARD_RUN_DIR"
"""Environment variable of every process of a run: its output folder. Whatever has it ends with the run."""


def environment_of_no_run() -> dict[str, str]:
    """This process's environment without `RUN_VARIABLE`: for a child whose work serves the machine, not the run."""
    return {name: value for name, value in os.environ.items() if name != RUN_VARIABLE}
