"""`autoshard export`."""

import pathlib
from typing import Annotated

import typer

from autoshard.cli.common import SavedPlan, Traceback, errors_shown

EPILOG = (
    "Examples:\n\n"
    "    autoshard export plan.json --to flax-rules --out rules.yaml\n\n"
    "    autoshard export plan.json --to maxtext --names names.yaml --out my-mesh.yml\n\n"
    "    autoshard export plan.json --to shardings --out shardings.json\n\n"
    "flax-rules: a logical name for every dimension of every argument, and rules from names to mesh axes that "
    "Linen and NNX read alike.\n\n"
    "maxtext: a configuration of MaxText, which inherits from its base.yml: mesh, sizes and all rules.\n\n"
    "shardings: JSON with the mesh axes of every dimension of every argument and output, to make NamedShardings "
    "of.\n\n"
    "Tensors of one logical name have one layout. Where a plan does not keep to that, the error names the tensors "
    "and the ways out; --nearest writes the rules that come nearest, with the deviations as comments.\n\n"
    "Of a plan in stages, flax-rules is one YAML document for each distinct stage, and shardings tells which stage "
    "runs where and how each is sharded. A MaxText file holds one mesh, and so is only for plans of one program."
)


def export(
    plan: SavedPlan,
    to: Annotated[str, typer.Option(metavar="FORM", help="flax-rules, maxtext or shardings.")],
    out: Annotated[pathlib.Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    names: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Names that the model has already: YAML with lines such as '*.up.kernel': \\[embed, mlp].",
        ),
    ] = None,
    nearest: Annotated[bool, typer.Option("--nearest", help="Accept rules that deviate from the plan.")] = False,
    traceback: Traceback = False,
) -> None:
    """Write a saved plan as Flax logical-axis rules, as a MaxText file, or as plain shardings."""
    with errors_shown(traceback):
        from autoshard.files import write_text_atomically
        from autoshard.offloading.reading import load
        from autoshard.plans.export import form_named, read_names

        form_named(to)  # refuses what is none before anything is read
        text = load(plan).export(to, None if names is None else read_names(names), nearest)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_text_atomically(out, text)
