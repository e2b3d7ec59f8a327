"""No file makes autoshard run code or leave a folder: what no module may call, and names that lead elsewhere."""

import ast
import os
import pathlib
import shutil

import pytest

from autoshard.checkpoints.manifest import FileEntry
from autoshard.checkpoints.verification import damaged_files
from autoshard.errors import FolderError
from autoshard.launch.engines.host_memory import host_memory_dir
from autoshard.launch.engines.local import LocalEngine

PACKAGE = pathlib.Path(__file__).parents[1] / "autoshard"
SERIALIZERS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
"""Libraries whose readers run what a file says."""
PIPE_TO_OWN_CHILD = PACKAGE / "solver" / "exact" / "mathopt_process.py"
"""Talks to a process that it started itself, over pipes that nobody else has."""
LAZY_PUBLIC_NAMES = PACKAGE / "__init__.py"
"""Imports modules of its own by names that stand in it."""


def calls_in(tree: ast.Module) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def imports_in(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def refused(path: pathlib.Path, text: str) -> list[str]:
    """What in a module's text could run what a file says."""
    tree = ast.parse(text)
    found = [name for name in imports_in(tree) & SERIALIZERS if path != PIPE_TO_OWN_CHILD]
    for call in calls_in(tree):
        name = ast.unparse(call.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        runs = name in {"eval", "exec", "__import__", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load"}
        imports = name.endswith("import_module") and path != LAZY_PUBLIC_NAMES
        unsafe_yaml = name == "yaml.load" and keywords.get("Loader") != "_PlainLoader"
        if runs or imports or unsafe_yaml or "True" in (keywords.get("shell"), keywords.get("allow_pickle")):
            found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from dill import loads",
        "eval(text)",
        "os.system(name)",
        "importlib.import_module(name)",
        "yaml.load(text, Loader=yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_what_is_refused(text):
    assert refused(PACKAGE / "some.py", text)


def test_no_module_runs_what_a_file_says():
    modules = sorted(PACKAGE.rglob("*.py"))
    assert len(modules) > 200
    assert {str(path): found for path in modules if (found := refused(path, path.read_text()))} == {}


def test_a_manifest_cannot_name_what_lies_elsewhere(tmp_path):
    step = tmp_path / "10"
    step.mkdir()
    (tmp_path / "secret").write_text("")
    (step / "link").symlink_to(tmp_path)
    for name in ("../secret", "/etc/passwd", "a/../../secret", "a\0b", ""):
        with pytest.raises(ValueError, match="lies in its folder"):
            FileEntry(path=name, size_bytes=0, checksum="0" * 16)
    (fault,) = damaged_files(step, [FileEntry(path="link/secret", size_bytes=0, checksum="0" * 16)])
    assert "must stay inside" in fault.why


def test_memory_of_a_host_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    parent = host_memory_dir(tmp_path / "run", "here").parent
    parent.mkdir(parents=True)
    try:
        parent.chmod(0o777)
        with pytest.raises(FolderError, match="chmod 700"):
            LocalEngine(tmp_path / "run", 1, host="here")
        parent.chmod(0o700)
        engine = LocalEngine(tmp_path / "run", 1, host="here")
        os.mkdir(engine.capacity()[0].memory_dir)
        engine.forget_memory()
        assert not parent.exists()
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def test_memory_of_runs_whose_output_folder_is_gone_is_freed(tmp_path):
    gone, stays = (tmp_path / name for name in ("gone", "stays"))
    states = []
    for run_dir in (gone, stays):
        run_dir.mkdir()
        states.append(pathlib.Path(LocalEngine(run_dir, 1, host="here").capacity()[0].memory_dir, "state"))
        states[-1].parent.mkdir()
        states[-1].touch()
    gone.rmdir()
    engine = LocalEngine(tmp_path, 1, host="here")
    try:
        assert [state.exists() for state in states] == [False, True]
        engine.close()
        assert not host_memory_dir(tmp_path, "here").parent.exists(), "nothing is left of a run without states"
        assert states[1].exists()
    finally:
        shutil.rmtree(states[1].parents[1])
