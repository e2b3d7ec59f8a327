"""The `autoshard` command: plan and train a configuration, explain, compare and verify plans, solve a problem file."""

import contextlib
import json
import os
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Annotated, Any

import rich.console
import rich.text
import typer

from autoshard.errors import AutoshardError, ConfigError

INTERRUPTED = 130
"""Exit status of a run that Ctrl-C stopped: 128 + SIGINT, as shells count."""

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Chooses how a JAX training step is split over a cluster, shows why, and runs it.",
    epilog=(
        "Start here, on any machine, with eight CPU devices:\n\n    autoshard train configs/quickstart.yaml --devices 8"
    ),
)

Config = Annotated[pathlib.Path, typer.Argument(metavar="CONFIG", help="A training configuration, in YAML.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Replace entries of the configuration, as in train.steps=100."),
]
Devices = Annotated[int | None, typer.Option(min=1, help="Use this many CPU devices instead of the machine's own.")]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show where in the code an error arose.")]


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard train configs/quickstart.yaml --devices 8\n\n"
        "    autoshard train configs/quickstart.yaml train.steps=50 optimizer.learning_rate=1e-3\n\n"
        "    autoshard train configs/quickstart.yaml train.steps=600 train.resume=true\n\n"
        "Ctrl-C (or SIGTERM) ends the run after its current step, saves it, and exits with status 130; "
        "train.resume=true continues it. A second Ctrl-C ends it at once, unsaved."
    )
)
def train(config: Config, overrides: Overrides = None, devices: Devices = None, traceback: Traceback = False) -> None:
    """Plan a training run for this machine's devices and carry it out, in stages where they are of several kinds.

    The output folder (train.output_dir) receives config.yaml, plan.json, metrics.jsonl and checkpoints/, and what
    else is asked for: tensorboard/ and profile/.
    """
    with _errors_shown(traceback):
        settings = _load(config, overrides, devices=devices)
        _use_cpu_devices(settings.devices)
        from autoshard.train.processes import is_first, join_processes
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


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard plan configs/gpt3_175b.yaml\n\n"
        "    autoshard plan configs/gpt_1.3b.yaml --cluster configs/clusters/h100x16.yaml --mesh data=4,tensor=4\n\n"
        "    autoshard plan configs/quickstart.yaml --devices 8 --budget-gb 0.02 --out plan.json\n\n"
        "    autoshard plan configs/gpt_350m.yaml --cluster configs/clusters/v100x8_p100x8.yaml --out staged.json\n\n"
        "    autoshard plan configs/gpt_350m.yaml --cluster configs/clusters/v100x8.yaml plan.stages.num_stages=2\n\n"
        "On a cluster with several kinds of devices, as in the last example but one, the step is cut into stages, each "
        "on a mesh of its own; with plan.stages it is on one kind too (plan.stages={} fixes nothing).\n\n"
        "To solve on another machine:"
        "\n\n"
        "    autoshard plan configs/gpt_125m.yaml --mesh data=4,tensor=2 --problem-only problem.npz\n\n"
        "    autoshard solve problem.npz --time-limit 600 --out solution.json\n\n"
        "    autoshard plan configs/gpt_125m.yaml --mesh data=4,tensor=2 --solution solution.json\n\n"
        "The first Ctrl-C ends the search with the best plan so far."
    )
)
def plan(
    config: Config,
    overrides: Overrides = None,
    cluster: Annotated[
        pathlib.Path | None, typer.Option(help="Plan for the cluster of this file; none of it need be at hand.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="NAME=SIZE,...", help="Fix the mesh, as in data=4,tensor=4.")
    ] = None,
    out: Annotated[pathlib.Path | None, typer.Option(help="Save the plan to this file.")] = None,
    budget_gb: Annotated[
        float | None, typer.Option(help="Memory that the plan may use on each device, in 1e9 bytes.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(help="Seconds that each solve may take; two runs by the clock may end differently.")
    ] = None,
    work_limit: Annotated[
        float | None,
        typer.Option(help="Limit in units of counted work, not by the clock: the answer is repeatable."),
    ] = None,
    cache: Annotated[bool | None, typer.Option(help="Answer from earlier runs, or start from them.")] = None,
    problem_only: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Only write the problem, for `autoshard solve` elsewhere; needs --mesh."),
    ] = None,
    solution: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Make the plan of this solution of the problem that --problem-only wrote."),
    ] = None,
    devices: Devices = None,
    traceback: Traceback = False,
) -> None:
    """Plan a training step and print the plan: its mesh, shardings, time, memory, and how good it provably is.

    Nothing is allocated and nothing runs, so that a model and a cluster of any size can be planned on a laptop.
    """
    with _errors_shown(traceback):
        settings = _load(
            config,
            overrides,
            devices=devices,
            **_plan_settings(cluster, mesh, budget_gb, time_limit, work_limit, cache),
        )
        _use_cpu_devices(settings.devices)
        from autoshard.train.planning import make_plan_visibly, write_config_problem
        from autoshard.train.registry import train_functions

        functions, console = train_functions(settings), rich.console.Console(stderr=True)
        if problem_only is not None:
            write_config_problem(settings, functions, problem_only, console)
            console.print(f"Solve it with: autoshard solve {problem_only} --out solution.json", soft_wrap=True)
            return
        made = make_plan_visibly(settings, functions, console, solution)
        typer.echo(made)
        if out is not None:
            made.save(out)


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard explain runs/quickstart/plan.json\n\n"
        "    autoshard explain staged.json --timeline step.html\n\n"
        "    autoshard explain staged.json --program 0\n\n"
        "A plan in stages, as it is made for clusters with several kinds of devices, is told as a whole: slices, "
        "pipelines, stages, what crosses between them. --program tells one of its stages as any plan is told."
    )
)
def explain(
    plan: Annotated[pathlib.Path, typer.Argument(metavar="PLAN", help="A saved plan.")],
    timeline: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Draw the step of a plan in stages into this .html or .png file."),
    ] = None,
    program: Annotated[
        int | None, typer.Option(metavar="N", help="Explain only this program of a plan in stages.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Explain a saved plan: what it decides, what it costs, and why."""
    with _errors_shown(traceback):
        from autoshard.api import load

        found = load(plan)
        typer.echo(found.explain(program))
        if timeline is not None:
            typer.echo(found.draw_timeline(timeline))


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard compare configs/gpt_1.3b.yaml --cluster configs/clusters/h100x8.yaml\n\n"
        "    autoshard compare configs/gpt_125m.yaml --picture comparison.html --json comparison.json\n\n"
        "    autoshard compare configs/quickstart.yaml --only ddp,zero3,zero3+megatron --time-limit 10\n\n"
        "A strategy is planned like any program, under the restrictions that make it what it is, so that each is the "
        "best of its kind under the same costs and limits. `vs plan` is its step time as a multiple of the plan's. "
        "A strategy that exceeds the memory is shown with what it would need. Without --mesh, every strategy has the "
        "meshes that suit it. Ctrl-C ends the search at hand with its best plan so far, and the next contender "
        "follows; a second one during the same search ends all."
    )
)
def compare(
    config: Config,
    overrides: Overrides = None,
    cluster: Annotated[
        pathlib.Path | None, typer.Option(help="Compare on the cluster of this file; none of it need be at hand.")
    ] = None,
    mesh: Annotated[
        str | None, typer.Option(metavar="NAME=SIZE,...", help="One mesh for all, as in data=4,tensor=4.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="NAME,...", help="Only these strategies, as in ddp,zero3+megatron.")
    ] = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
    picture: Annotated[
        pathlib.Path | None,
        typer.Option(metavar="FILE", help="Draw time and memory into this .html, .png or .svg file; needs matplotlib."),
    ] = None,
    budget_gb: Annotated[float | None, typer.Option(help="Memory for each device, in 1e9 bytes.")] = None,
    time_limit: Annotated[float | None, typer.Option(help="Seconds that each solve may take.")] = None,
    work_limit: Annotated[float | None, typer.Option(help="Limit in units of counted work, not by the clock.")] = None,
    cache: Annotated[bool | None, typer.Option(help="Answer from earlier runs, or start from them.")] = None,
    devices: Devices = None,
    traceback: Traceback = False,
) -> None:
    """Show the plan beside data parallelism, ZeRO, Megatron and their mixes: time, communication, memory, proof."""
    with _errors_shown(traceback):
        settings = _load(
            config,
            overrides,
            devices=devices,
            **_plan_settings(cluster, mesh, budget_gb, time_limit, work_limit, cache),
        )
        _use_cpu_devices(settings.devices)
        from autoshard.comparison.outputs import check_outputs, strategies_named, write_outputs
        from autoshard.train.planning import make_comparison_visibly
        from autoshard.train.registry import runs_in_stages, train_functions

        check_outputs(picture)
        if picture is not None and runs_in_stages(settings):
            raise ConfigError(
                "--picture: a picture shows what time and memory are made of, and of a step in stages the search tells "
                "only the times of other forms. Leave it out, or name a cluster of one kind of device."
            )
        strategies, console = strategies_named(only), rich.console.Console(stderr=True)
        found = make_comparison_visibly(settings, train_functions(settings), console, strategies)
        write_outputs(found, rich.console.Console(), json_file, picture)


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard verify plan.json\n\n"
        "    autoshard verify plan.json --target h100 --target tpu-v5e --json verified.json\n\n"
        "    autoshard verify runs/quickstart/plan.json --target cpu --time-limit 300\n\n"
        "No device is needed: XLA's own compilers run without them. For GPUs, pip install 'autoshard[verify-gpu]'; for "
        "TPUs, pip install 'autoshard[verify-tpu]'; cpu always works. Of a plan in stages every program is verified, "
        "for its own kind of device or for --target.\n\n"
        "The exit status is 0 if every target confirms the prediction: over each set of mesh axes, traffic within 5 % "
        "of all that is sent, and no more than 3 % more memory than predicted; 1 if one does not; 2 if one cannot be "
        "verified."
    )
)
def verify(
    plan: Annotated[pathlib.Path, typer.Argument(metavar="PLAN", help="A saved plan.")],
    config: Annotated[
        pathlib.Path | None,
        typer.Option(help="The configuration that the plan was made from; by default the one that it carries."),
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Compile for these devices: h100, a100-40, tpu-v5e, cpu, ...; repeatable."),
    ] = None,
    json_file: Annotated[
        pathlib.Path | None, typer.Option("--json", metavar="FILE", help="Write all figures to this file.")
    ] = None,
    time_limit: Annotated[
        float | None, typer.Option(min=0.1, help="Seconds that the verification for each target may take.")
    ] = None,
    traceback: Traceback = False,
) -> None:
    """Compile a saved plan without its devices, and show what the compiler made of it beside what was predicted."""
    with _errors_shown(traceback):
        from autoshard.train.verify import verify_visibly

        found = verify_visibly(plan, config, target or [], time_limit, json_file, rich.console.Console(stderr=True))
        if found.exit_status:
            raise typer.Exit(found.exit_status)


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard diff before.json after.json\n\n"
        "    autoshard diff before.json after.json --json changes.json\n\n"
        "Every figure is B less A. Layers fold together: `*` stands for their numbers, {mu,nu} for paths that changed "
        "alike. What an argument's own collectives and memory cost stands beside it; every other collective stands "
        "under the operation and line that makes its tensor, such as the product that makes a gradient. The figures "
        "add up to the difference of the step times. Plans on different meshes or clusters are compared by what each "
        "device holds, not by the names of axes."
    )
)
def diff(
    a: Annotated[pathlib.Path, typer.Argument(metavar="A", help="A saved plan.")],
    b: Annotated[pathlib.Path, typer.Argument(metavar="B", help="Another.")],
    json_file: Annotated[pathlib.Path | None, typer.Option("--json", help="Write the difference to this file.")] = None,
    traceback: Traceback = False,
) -> None:
    """Show what differs between two saved plans, and what each difference costs."""
    with _errors_shown(traceback):
        from autoshard.api import load
        from autoshard.files import write_text_atomically
        from autoshard.printing import PAGE_WIDTH

        found = load(a).diff(load(b))
        typer.echo(found.text(max(PAGE_WIDTH, rich.console.Console().width)))
        if json_file is not None:
            write_text_atomically(json_file, found.json() + "\n")


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard export plan.json --to flax-rules --out rules.yaml\n\n"
        "    autoshard export plan.json --to maxtext --names names.yaml --out my-mesh.yml\n\n"
        "    autoshard export plan.json --to shardings --out shardings.json\n\n"
        "flax-rules: a logical name for every dimension of every argument, and rules from names to mesh axes that "
        "Linen and NNX read alike.\n\n"
        "maxtext: a file for MaxText's option custom_mesh_and_rule.\n\n"
        "shardings: JSON with the mesh axes of every dimension of every argument and output, to make NamedShardings "
        "of.\n\n"
        "Tensors of one logical name have one layout. Where a plan does not keep to that, the error names the tensors "
        "and the ways out; --nearest writes the rules that come nearest, with the deviations as comments."
    )
)
def export(
    plan: Annotated[pathlib.Path, typer.Argument(metavar="PLAN", help="A saved plan.")],
    to: Annotated[str, typer.Option(metavar="FORM", help="flax-rules, maxtext or shardings.")],
    out: Annotated[pathlib.Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
    names: Annotated[
        pathlib.Path | None,
        typer.Option(
            metavar="FILE",
            help="Names that the model has already: YAML with lines such as '*.up.kernel': [embed, mlp].",
        ),
    ] = None,
    nearest: Annotated[bool, typer.Option("--nearest", help="Accept rules that deviate from the plan.")] = False,
    traceback: Traceback = False,
) -> None:
    """Write a saved plan as Flax logical-axis rules, as a MaxText file, or as plain shardings."""
    with _errors_shown(traceback):
        from autoshard.api import load
        from autoshard.files import write_text_atomically
        from autoshard.plans.export import form_named, read_names

        form_named(to)  # refuses what is none before anything is read
        text = load(plan).export(to, None if names is None else read_names(names), nearest)
        if out is None:
            typer.echo(text, nl=False)
        else:
            write_text_atomically(out, text)


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard calibrate --devices 8 --out cluster.yaml\n\n"
        "    autoshard calibrate --quick --out cluster.yaml\n\n"
        "    autoshard plan configs/gpt_tiny.yaml --cluster cluster.yaml\n\n"
        "What is measured, with all devices busy at once: matrix products by type and size, memory, elementwise "
        "arithmetic, the launch of a kernel, and each kind of collective among 2, 4, ... devices by size. The machine "
        "should have nothing else to do. Plans for the file that is written use these figures.\n\n"
        "Timings are kept beside the file while they are made: after Ctrl-C (or a crash), the same command goes on "
        "from there. A file that is there already is replaced when all is done."
    )
)
def calibrate(
    out: Annotated[pathlib.Path, typer.Option(help="The cluster file to write.")] = pathlib.Path("cluster.yaml"),
    cluster: Annotated[
        pathlib.Path | None,
        typer.Option(help="Describe the devices by this cluster file, where the catalogue does not know them."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and repetitions: sooner, and less sure.")] = False,
    devices: Devices = None,
    traceback: Traceback = False,
) -> None:
    """Measure the live devices, and write a cluster file with what they really do.

    Takes minutes; how many depends on how busy the machine is, and it should not be.
    """
    with _errors_shown(traceback):
        _use_cpu_devices(devices)
        from autoshard.calibration.display import calibrate_visibly

        table = calibrate_visibly(out, cluster, quick, rich.console.Console(stderr=True))
        if table is None:
            raise typer.Exit(INTERRUPTED)
        typer.echo(table, nl=False)


@app.command(
    epilog=(
        "Examples:\n\n"
        "    autoshard solve problem.npz --time-limit 60 --out solution.json\n\n"
        "    autoshard solve asplos-2025-iopddl-A.json.gz --time-limit 60\n\n"
        "The last line of the output is the list of choices, one per node; the line before holds cost and lower bound. "
        "Ctrl-C ends the search with the best solution so far. By the clock, two runs may end differently; with "
        "--work-limit, the same problem, seed and limit give the same answer on any machine. "
        "The exit status is 2 if there is no solution, if none was found, or if the file cannot be read."
    )
)
def solve(
    context: typer.Context,
    file: Annotated[
        pathlib.Path,
        typer.Argument(
            metavar="FILE",
            help="A problem of `autoshard plan --problem-only`, or an instance of the ASPLOS 2025 contest.",
        ),
    ],
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="Seconds, from the start of the process; reading the file is included.")
    ] = 60.0,
    out: Annotated[pathlib.Path | None, typer.Option(help="Write the solution to this file.")] = None,
    gap: Annotated[
        float, typer.Option(min=0.0, help="Stop once the cost is proven to be within this share of the optimum.")
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of everything that is random.")] = 0,
    work_limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Limit in units of counted work (about a second each) instead of the clock."),
    ] = None,
    cache: Annotated[
        bool,
        typer.Option(
            help="Start from solutions of earlier runs, and keep this one (AUTOSHARD_CACHE names the folder)."
        ),
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the solution as JSON, in one line, instead.")] = False,
    traceback: Traceback = False,
) -> None:
    """Solve a problem from a file, on any machine; needs no JAX.

    Prints cost, proven lower bound and the choices. `autoshard plan --solution` makes a plan of them.
    """
    started = time.perf_counter()
    is_alone = isinstance(context.obj, float)  # called by `main`: this process has no other task
    if is_alone:
        started = context.obj
        _keep_stdout_for_python()
    with _errors_shown(traceback):
        from autoshard.solve_file import SolveRequest, solve_file
        from autoshard.solver.io.solution_cache import default_cache

        request = SolveRequest(
            file, out, time_limit, work_limit, gap, seed, default_cache() if cache else None, started, is_alone
        )
        show = lambda answer: typer.echo(answer.json() if as_json else answer.lines())
        solve_file(request, rich.console.Console(stderr=True), show)


def main() -> None:
    """Runs the command line; time limits count from the start of the process."""
    app(obj=time.perf_counter() - _process_age_s())


def _keep_stdout_for_python() -> None:
    """Silences what libraries print by way of C, which would come out at exit, after the answer."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _process_age_s() -> float:
    """Seconds since this process was started; 0 where the system does not tell."""
    try:
        stat = pathlib.Path("/proc/self/stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[19])  # field 22: start, in clock ticks since boot
        return max(time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"), 0.0)
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def _load(config: pathlib.Path, overrides: list[str] | None, **options: Any) -> Any:
    """The configuration, with `options` that are not None as overrides that come last."""
    from autoshard.train.config import load_config

    given = [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None]
    return load_config(config, [*(overrides or []), *given])


def _plan_settings(
    cluster: pathlib.Path | None,
    mesh: str | None,
    budget_gb: float | None,
    time_limit: float | None,
    work_limit: float | None,
    cache: bool | None,
) -> dict[str, object]:
    """Options of a command that plans, as overrides of its configuration; None leaves what the file says."""
    return {
        "plan.cluster": None if cluster is None else str(cluster),
        "plan.mesh": None if mesh is None else _mesh_sizes(mesh),
        "plan.memory_budget_bytes": None if budget_gb is None else round(budget_gb * 1e9),
        "plan.time_limit_s": time_limit,
        "plan.work_limit": work_limit,
        "plan.cache": cache,
    }


def _mesh_sizes(text: str) -> dict[str, int]:
    """`data=4,tensor=2` as a mapping."""
    sizes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = item.partition("=")
        if not (name.strip().isidentifier() and size.strip().isdecimal()) or name.strip() in sizes:
            raise ConfigError(
                f"--mesh: axes are written NAME=SIZE, each name once, separated by commas; received {text!r}. "
                "Try: data=4,tensor=4."
            )
        sizes[name.strip()] = int(size)
    return sizes


def _use_cpu_devices(count: int | None) -> None:
    """Gives JAX `count` CPU devices and no others; must come before JAX's first use of a device."""
    if count is None:
        return
    import jax

    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise ConfigError(f"devices: must be set before JAX is first used; received {count}. {error}") from error


@contextlib.contextmanager
def _errors_shown(traceback: bool) -> Iterator[None]:
    """Prints an AutoshardError as one message and exits with status 2, unless its traceback is wanted."""
    try:
        yield
    except AutoshardError as error:
        if traceback:
            raise
        console = rich.console.Console(stderr=True)
        console.print(rich.text.Text(f"error: {error}", style="bold red"), soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
