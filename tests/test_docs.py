"""The documentation is true: its Python blocks run, its commands parse, and what it names exists and is complete.

All Python blocks of one document run in order in one namespace, in an empty folder that holds a link to `configs`. A
block after the comment `<!-- not run: reason -->` is only compiled.
"""

import pathlib
import re
import shlex

import pytest
import rich.text
import typer
import typer.main

import autoshard
import autoshard.errors
from autoshard.cli import app

ROOT = pathlib.Path(__file__).parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SET_BY_CONFTEST = re.compile(r'^jax\.config\.update\("jax_num_cpu_devices", 8\)', re.MULTILINE)
"""May stand only before JAX's first use of a device; `conftest.py` has done the same."""

by_name = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)


def blocks(document: pathlib.Path, language: str) -> list[tuple[int, bool, str]]:
    """The fenced blocks in a language: line number of the first line, whether it is to be run, text."""
    text = document.read_text()
    fence = re.compile(rf"^(<!-- not run: [^\n]*-->\n+)?```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = []
    for match in fence.finditer(text):
        found.append((text.count("\n", 0, match.start(2)) + 1, match[1] is None, match[2]))
    return found


@pytest.mark.slow
@by_name
def test_python_blocks_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    namespace = {"__name__": "__main__"}
    for line, is_run, text in blocks(document, "python"):
        source = "\n" * (line - 1) + SET_BY_CONFTEST.sub("", text)
        code = compile(source, str(document), "exec")
        if is_run:
            exec(code, namespace)


@by_name
def test_commands_parse(document):
    group = typer.main.get_command(app)
    for _, _, text in blocks(document, "bash"):
        for command in text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", command):
                words = shlex.split(part, comments=True)
                if words[:1] != ["autoshard"] or words[1:] in ([], ["--help"]):
                    continue
                subcommand = group.commands[words[1]]
                if "--help" in words:
                    continue
                subcommand.make_context(words[1], words[2:])  # raises a usage error for what the command does not know


@by_name
def test_named_files_exist(document):
    text = document.read_text()
    links = [target for target in re.findall(r"\]\(([^)#\s]+)", text) if "://" not in target]
    missing = [target for target in links if not (document.parent / target).exists()]
    paths = re.findall(r"(?<![\w/.])(?:autoshard|configs|docs|models|tests|benchmarks|\.ci)/[\w./-]*\w", text)
    missing += [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@by_name
def test_functions_are_where_the_text_says(document):
    places = re.findall(r"`([\w.]+)`\s+in\s+`(autoshard/[\w/]+\.py)`", document.read_text())
    defined = r"^\s*(?:def|class) {0}\b|^{0}\b.* = "
    missing = [
        f"{name} in {path}"
        for name, path in places
        if not re.search(defined.format(name.split(".")[-1]), (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert not missing


def test_every_error_is_explained():
    text = (ROOT / "docs" / "errors.md").read_text()
    names = [name for name, kind in vars(autoshard.errors).items() if isinstance(kind, type)]
    assert [name for name in names if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", typer.main.get_command(app).commands)
def test_command_line_page_has_the_texts_of_help(name):
    command = typer.main.get_command(app).commands[name]
    text = (ROOT / "docs" / "command_line.md").read_text()
    section = re.search(rf"^## autoshard {name}$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section, f"docs/command_line.md has no section `## autoshard {name}`"
    rows = []
    for parameter in command.params:
        is_option = parameter.opts[0].startswith("-")
        names = [*parameter.opts, *parameter.secondary_opts] if is_option else [parameter.metavar or parameter.name]
        shown = rich.text.Text.from_markup(parameter.help).plain
        rows.append(f"| {', '.join(f'`{name}`' for name in names)} | {shown} |")
    assert [line for line in section[1].splitlines() if line.startswith("| `")] == rows


def test_api_pages_show_every_public_name():
    text = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: autoshard\.(\w+)$", text, re.MULTILINE)
    assert sorted(shown) == sorted(autoshard.__all__)


def test_design_names_every_package():
    text = (ROOT / "docs" / "design.md").read_text()
    packages = [path.parent.relative_to(ROOT) for path in (ROOT / "autoshard").rglob("__init__.py")]
    assert [str(path) for path in packages if f"`{path}/`" not in text] == []
