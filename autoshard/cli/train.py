"""`autoshard train`."""

import typer

from autoshard.cli.common import (
    INTERRUPTED,
    Config,
    Devices,
    Overrides,
    Traceback,
    errors_shown,
    load_settings,
    use_cpu_devices,
)

EPILOG = (
    "Examples:\n\n"
    "    autoshard train configs/quickstart.yaml --devices 8\n\n"
    "    autoshard train configs/quickstart.yaml train.steps=50 optimizer.learning_rate=1e-3\n\n"
    "    autoshard train configs/quickstart.yaml train.steps=600 train.resume=true\n\n"
    "Ctrl-C (or SIGTERM) ends the run after its current step, saves it, and exits with status 130; "
    "train.resume=true continues it. A second Ctrl-C ends it at once, unsaved."
)


def train(config: Config, overrides: Overrides = None, devices: Devices = None, traceback: Traceback = False) -> None:
    """Plan a training run for this machine's devices and carry it out, in stages where they are of several kinds.

    The output folder (train.output_dir) receives config.yaml, plan.json, metrics.jsonl and checkpoints/, and what
    else is asked for: tensorboard/ and profile/.
    """
    with errors_shown(traceback):
        settings = load_settings(config, overrides, devices=devices)
        from autoshard.elastic.lifeline import Lifeline

        lifeline = Lifeline.of_this_process()
        if lifeline is not None:
            from autoshard.train.supervised import serve_training

            serve_training(lifeline, settings)
        use_cpu_devices(settings.devices)
        from autoshard.elastic.decisions import is_first
        from autoshard.train.processes import join_processes
        from autoshard.train.trainer import train as run

        if settings.distributed:
            join_processes()
        result = run(settings)
        if result.loss is not None and is_first():
            typer.echo(f"Step {result.step}, loss {result.loss:.3f}; results are in {result.output_dir}")
        if result.interrupted:
            if is_first():
                typer.echo("Stopped by a signal and saved; train.resume=true continues the run.")
            raise typer.Exit(INTERRUPTED)
