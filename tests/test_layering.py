"""The order of the rooms, read from the imports of every module: a room imports only from rooms below it."""

import ast
import dataclasses
import functools
import graphlib
import pathlib
import tomllib

import pytest

ROOT = pathlib.Path(__file__).parents[1]
FLOORS = (
    {
        "annotations",
        "errors",
        "files",
        "folders",
        "garbage",
        "interrupts",
        "loss_function",
        "module_params",
        "pictures",
        "printing",
        "run_processes",
        "side_by_side",
        "suggestions",
        "watchdog",
        "train_step",
        "user_cache",
    },
    {"graph", "cluster", "solver", "pipelines.schedule", "launch"},
    {"trace", "cost", "transfer", "calls", "balance"},
    {"compiler", "hlo", "checkpoints", "remat", "placement", "tables", "uneven_step"},
    {"planner", "execution"},
    {"pipelines.split"},
    {"plans"},
    {"strategies", "verify"},
    {"comparison", "pipelines.cost"},
    {"pipelines.search"},
    {"pipelines.plan"},
    {"pipelines.run"},
    {"api"},
    {"baselines", "host_tables"},
    {"elastic", "offloading"},
    {"train", "calibration", "solve_file", "report"},
    {"share"},
    {"cli"},
    {"__main__"},
)
"""From the ground up. Rooms of one floor do not import each other, except on the ground floor."""
JAX_FREE_ROOMS = {
    "balance",
    "graph",
    "solver",
    "cluster",
    "placement",
    "compiler",
    "hlo",
    "pipelines.schedule",
    "launch",
}
REACHING_INTO_JAX = {
    "autoshard.elastic.compile_cache",
    "autoshard.elastic.coordination",
    "autoshard.trace.absent_cudnn",
    "autoshard.trace.references",
}
"""The only modules that use what is private to JAX; each says why."""
JAXPR_ROOMS = {"trace", "execution", "pipelines.split", "remat", "tables"}
"""The tracing and execution rooms: only these touch jaxprs."""


def room_of(name: str) -> str:
    """The sub-package of autoshard that a dotted name lies in; of the wing `pipelines`, its room."""
    parts = name.split(".")[1:]
    return ".".join(parts[:2] if parts[:1] == ["pipelines"] else parts[:1])


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported module or name; `is_lazy` where it is imported inside a function."""

    target: str
    is_lazy: bool
    line: int


@dataclasses.dataclass(frozen=True)
class Module:
    """One source file: its dotted name and what it imports."""

    name: str
    path: pathlib.Path
    imports: tuple[Import, ...]

    @property
    def room(self) -> str:
        """The room of the module; the empty string for `autoshard/__init__.py`."""
        return room_of(self.name)


def imports_of(tree: ast.Module, package: str) -> list[Import]:
    found = []

    def visit(node: ast.AST, is_lazy: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, is_lazy, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            origin = ".".join(filter(None, (base if node.level else "", node.module)))
            found.extend(Import(f"{origin}.{alias.name}", is_lazy, node.lineno) for alias in node.names)
        inside = is_lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, inside)

    visit(tree, False)
    return found


@functools.cache
def read_modules(folder: pathlib.Path, package: str) -> list[Module]:
    modules = []
    for path in sorted(folder.rglob("*.py")):
        parts = [package, *path.relative_to(folder).with_suffix("").parts]
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        inside = name if is_package else name.rpartition(".")[0]
        modules.append(Module(name, path, tuple(imports_of(ast.parse(path.read_text()), inside))))
    return modules


def modules() -> list[Module]:
    """All of autoshard; read by the first test that asks, not by each process that collects tests."""
    return read_modules(ROOT / "autoshard", "autoshard")


@functools.cache
def module_names() -> frozenset[str]:
    return frozenset(m.name for m in modules())


def within(target: str, name: str) -> bool:
    """Whether an imported name is `name` or lies inside it."""
    return target == name or target.startswith(name + ".")


def floor_of(room: str) -> int:
    return next(n for n, rooms in enumerate(FLOORS) if room in rooms)


def test_every_room_has_a_floor():
    assert {m.room for m in modules()} - {"", "pipelines"} <= set.union(*FLOORS)


def test_every_package_is_installed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    assert {m.name for m in modules() if m.path.name == "__init__.py"} | {"autoshard_models"} == listed


def test_imports_point_down():
    for module, one in ((m, one) for m in modules() for one in m.imports):
        if not within(one.target, "autoshard") or not module.room or one.target == "autoshard.__version__":
            continue
        room = room_of(one.target)
        assert room in set.union(*FLOORS), f"{module.path}:{one.line} imports {one.target}, which is in no room"
        here, there = floor_of(module.room), floor_of(room)
        is_allowed = room == module.room or there < here or here == there == 0
        assert is_allowed, f"{module.path}:{one.line} is in `{module.room}` and imports `{one.target}`"


@pytest.mark.parametrize(
    ("what", "rooms"),
    [
        ("ortools", {"solver", "share"}),
        ("numba", {"solver", "compiler"}),
        ("jax.extend", JAXPR_ROOMS),
        ("jax._src", {"elastic", "trace"}),
    ],
)
def test_what_only_some_rooms_may_import(what, rooms):
    users = [(m, one) for m in modules() for one in m.imports if within(one.target, what)]
    assert [f"{m.path}:{one.line}" for m, one in users if m.room not in rooms] == []
    assert {m.room for m, _ in users} == rooms


def test_jaxprs_are_reached_by_no_other_road():
    for module in modules():
        text = module.path.read_text()
        if module.name in REACHING_INTO_JAX:
            text = text.replace("jax._src", "")
        assert "jax._src" not in text and "jaxlib" not in text.replace('"/jaxlib/"', ""), module.path
        if module.room not in JAXPR_ROOMS:
            assert "jax.core" not in text and "jax.interpreters" not in text, module.path


def test_rooms_that_know_nothing_of_jax():
    found = [
        (m, one)
        for m in modules()
        for one in m.imports
        if m.room in JAX_FREE_ROOMS and any(within(one.target, library) for library in ("jax", "flax", "optax"))
    ]
    of_detect = [one for m, one in found if m.name == "autoshard.cluster.detect"]
    assert of_detect and all(one.is_lazy for one in of_detect)
    assert [f"{m.path}:{one.line}" for m, one in found if one not in of_detect] == []


def test_the_compiler_is_described_without_the_problem():
    """What XLA does is told of graph, groups, values and layouts: not of the solver's nodes, nor of the trace."""
    allowed = {"compiler", "graph", "cluster", "cost", *FLOORS[0]}
    found = [
        (m, one) for m in modules() if m.room == "compiler" for one in m.imports if within(one.target, "autoshard")
    ]
    assert found and [f"{m.path}:{one.line}" for m, one in found if room_of(one.target) not in allowed] == []


def test_models_know_nothing_of_autoshard():
    models = read_modules(ROOT / "models", "autoshard_models")
    assert models
    for module in models:
        assert [one for one in module.imports if within(one.target, "autoshard")] == []
        assert "jax._src" not in module.path.read_text()


def test_no_cycles_among_modules():
    """All imports, also those inside functions: to the module itself or to the package whose `__init__` is named."""
    edges = {m.name: {home_of(one.target) for one in m.imports} - {None} for m in modules()}
    edges["autoshard"] = set()  # the public door opens lazily; nothing inside comes in by it, as the next test says
    graphlib.TopologicalSorter(edges).prepare()  # raises CycleError, naming the cycle


def test_nothing_inside_comes_in_by_the_public_door():
    public = {m.target for m in next(m for m in modules() if m.name == "autoshard").imports}
    for module in modules():
        for one in module.imports:
            through = home_of(one.target) == "autoshard" and one.target not in public | {"autoshard.__version__"}
            assert not through or not module.room, f"{module.path}:{one.line} imports `{one.target}`"


def home_of(target: str) -> str | None:
    """The module of autoshard that an imported name comes from."""
    names = module_names()
    while target and target not in names:
        target = target.rpartition(".")[0]
    return target or None
