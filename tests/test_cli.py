"""The `autoshard` command: its sub-commands, its help and its errors."""

import json
import pathlib
import sys

import pytest
import rich.text
import typer
from together import run_together
from typer.testing import CliRunner

from autoshard import Plan, StagedPlan
from autoshard.cli import app
from autoshard.verify.report import Report

CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
SMALL = ["model.overrides={num_layers: 1, embed_dim: 32, num_heads: 2}", "data.sequence_length=16"]


def invoke(*args: object):
    return CliRunner().invoke(app, [str(arg) for arg in args])


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("command", ["train", "plan", "explain", "compare", "diff", "export", "verify"])
def test_help_shows_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"autoshard {command} " in result.output.partition("Example")[2]


def test_no_help_takes_brackets_for_markup():
    """Rich drops what stands in brackets, as in `pip install 'autoshard[extra]'`, unless it is escaped."""
    lost = {}
    for name, command in typer.main.get_command(app).commands.items():
        texts = [command.help, command.epilog, *(getattr(p, "help", None) for p in command.params)]
        for text in filter(None, texts):
            shown = rich.text.Text.from_markup(text)
            if shown.spans or shown.plain.count("[") != text.count("["):
                lost[name] = text
    assert lost == {}


def test_a_plan_is_printed_saved_and_explained(tmp_path):
    out = tmp_path / "plan.json"
    result = invoke(
        "plan", CONFIGS / "gpt_125m.yaml", *SMALL, "--cluster", CONFIGS / "clusters" / "v100x16.yaml",
        "--mesh", "data=8,tensor=2", "--budget-gb", "3", "--time-limit", "5", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    plan = Plan.load(out)
    assert plan.mesh_axes == {"data": 8, "tensor": 2} and plan.budget_bytes == 3e9
    explained = invoke("explain", out)
    assert explained.exit_code == 0
    assert explained.stdout == result.stdout


@pytest.mark.parametrize("value", ["inf", "nan"])
def test_numbers_of_options_are_finite(value):
    result = invoke("plan", CONFIGS / "quickstart.yaml", "--budget-gb", value)
    assert result.exit_code == 2 and "a number must be finite" in one_line(result.output)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--out", "missing/plan.json"], "a file is written into a folder that is there"),
        (["--slow", "first"], "--slow: slow devices are written DEVICE:SLOWDOWN, separated by commas"),
    ],
)
def test_what_would_be_refused_behind_the_search_is_refused_before_it(option, told, monkeypatch):
    def search(*args):
        raise AssertionError("it is planned first")

    monkeypatch.setattr("autoshard.train.planning.make_plan_to_keep_visibly", search)
    result = invoke("plan", CONFIGS / "gpt_125m.yaml", *SMALL, *option)
    assert result.exit_code == 2 and told in one_line(result.output), result.output


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["plan", "none.yaml"], "none.yaml"),
        (["explain", "none.json"], "none.json"),
        (["plan", CONFIGS / "quickstart.yaml", "data.batchsize=3"], "Did you mean `batch_size`?"),
        (["plan", CONFIGS / "quickstart.yaml", "--mesh", "data:4"], "NAME=SIZE"),
        (["plan", CONFIGS / "quickstart.yaml", "--mesh", "data=4,data=2"], "NAME=SIZE"),
        (["plan", CONFIGS / "quickstart.yaml", "--mesh", "data=0"], "plan.mesh.data"),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, "--mesh", "data=3"], "3"),
        (["plan", CONFIGS / "gpt_125m.yaml", "model.preset=huge"], "125m"),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, "--pipelines", "search", "--mesh", "data=8"], "received mesh="),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, "--pipelines", "maybe"], "plan.pipelines"),
        (["compare", CONFIGS / "gpt_125m.yaml", *SMALL, "plan.pipelines=search"], "plan.pipelines"),
    ],
)
def test_errors_are_one_message_and_status_2(args, told):
    result = invoke(*args)
    assert result.exit_code == 2
    assert told in one_line(result.stderr) and "Traceback" not in result.stderr
    assert result.stderr.startswith("error: ")
    assert invoke(*args, "--traceback").exception is not None


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A plan in stages for two kinds of devices, of which one takes the whole batch; and what was printed."""
    out = tmp_path_factory.mktemp("staged") / "staged.json"
    result = invoke(
        "plan", CONFIGS / "gpt_125m.yaml", *SMALL, "data.batch_size=8", "plan.stages.micro_batch_sizes=[8]",
        "plan.stages.num_stages=1", "plan.stages.most_devices_per_stage=1", "--time-limit", "5",
        "--cluster", CONFIGS / "clusters" / "v100x8_p100x8.yaml", "--out", out,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return out, result.stdout


def test_a_cluster_of_several_kinds_gets_a_plan_in_stages(staged, tmp_path):
    path, printed = staged
    plan = StagedPlan.load(path)
    assert [s.device for s in plan.slices] == ["V100-SXM2-32GB", "P100-SXM2"] and plan.parts == (8,)
    assert invoke("explain", path).stdout == printed
    drawn = invoke("explain", path, "--timeline", tmp_path / "step.html", "--program", "0")
    assert plan.programs[0].explain() in drawn.stdout and drawn.stdout.startswith("Program 0 (1 x): layers ")
    assert (tmp_path / "step.html").read_text().startswith("<!doctype html>")


@pytest.mark.slow
def test_the_programs_of_a_plan_in_stages_are_verified(staged, tmp_path):
    result = invoke("verify", staged[0], "--target", "cpu", "--json", tmp_path / "verified.json")
    assert result.exit_code in (0, 1), result.stderr
    assert "Program 0 (1 x)" in result.stdout and "Memory and work of one device" in result.stdout
    found = Report.load(tmp_path / "verified.json")
    assert found.exit_status == result.exit_code and [v.plan for v in found.outcomes] == ["stage_0_3"]


def test_plans_in_stages_are_told_apart_exported_and_compared(staged, tmp_path):
    same = invoke("diff", staged[0], staged[0], "--json", tmp_path / "diff.json")
    assert same.exit_code == 0 and "decide the same" in same.stdout
    assert json.loads((tmp_path / "diff.json").read_text())["stages"] == []
    exported = invoke("export", staged[0], "--to", "shardings")
    assert json.loads(exported.stdout)["pipelines"][0][0]["layers"] == [0, 3]
    compared = invoke(
        "compare", CONFIGS / "gpt_125m.yaml", *SMALL, "data.batch_size=8", "plan.stages.micro_batch_sizes=[8]",
        "plan.stages.num_stages=1", "plan.stages.most_devices_per_stage=1", "--time-limit", "5",
        "--cluster", CONFIGS / "clusters" / "v100x8_p100x8.yaml", "--json", tmp_path / "compared.json",
    )  # fmt: skip
    assert compared.exit_code == 0, compared.stderr
    assert "8 x V100-SXM2-32GB, 8 x P100-SXM2" in compared.stdout
    contenders = json.loads((tmp_path / "compared.json").read_text())["contenders"]
    plan = StagedPlan.load(staged[0])
    assert contenders[0]["step_s"] == plan.certificate.searched_s and len(contenders) == len(plan.considered)


def test_what_takes_one_program_says_so_of_a_plan_in_stages(staged, tmp_path):
    mixed = ["--cluster", CONFIGS / "clusters" / "v100x8_p100x8.yaml"]
    for args, told in [
        (["compare", CONFIGS / "gpt_125m.yaml", *SMALL, *mixed, "--picture", tmp_path / "p.png"], "--picture"),
        (["export", staged[0], "--to", "maxtext"], "in 1 stage on a mesh of its own"),
        (["explain", staged[0], "--program", "3"], "has the programs 0 to 0"),
        (["explain", staged[0], "--timeline", tmp_path / "step.svg"], ".html or .png"),
        (["compare", CONFIGS / "gpt_125m.yaml", *SMALL, *mixed, "--only", "ddp"], "strategies lay out one program"),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, *mixed, "--problem-only", tmp_path / "p.npz"], "one program"),
        (
            ["plan", CONFIGS / "gpt_125m.yaml", *SMALL, *mixed, "--mesh", "data=8"],
            "mesh= is for one program on one mesh",
        ),
        (
            ["plan", CONFIGS / "gpt_125m.yaml", *SMALL, *mixed, "--pipelines", "never"],
            "8` with V100-SXM2-32GB, P100-SXM2",
        ),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, *mixed, "--slow", "3:2"], "--slow: shares of a tensor axis"),
        (["report", staged[0], "--beside", staged[0]], "make the price of memory a curve"),
        (["plan", CONFIGS / "graph_network_tiny.yaml", *mixed], "same number in all; received `edges` ["),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, "plan.stages.schedules=[eager]"], "plan.stages.schedules"),
        (["plan", CONFIGS / "gpt_125m.yaml", *SMALL, "plan.stages.num_stage=2"], "`num_stages`"),
    ]:
        result = invoke(*args)
        assert result.exit_code == 2 and told in one_line(result.stderr), (args, result.output, result.stderr)
        assert result.stderr.startswith("error: ")


def test_training_on_other_devices_than_the_machine_s(tmp_path):
    """In a process of its own, since the number of devices is fixed at JAX's first use."""
    command = [sys.executable, "-c", "from autoshard.cli import app; app()", "train", CONFIGS / "quickstart.yaml"]
    command += [*SMALL, "train.steps=2", f"train.output_dir={tmp_path}", "--devices", "4"]
    (printed,) = run_together([list(map(str, command))])
    assert Plan.load(tmp_path / "plan.json").num_devices == 4
    assert "Step 2, loss 5." in printed
