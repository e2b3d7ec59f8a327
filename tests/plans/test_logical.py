"""Logical axes: loaded with Flax, under Linen's rules and under NNX's, they give the plan's shardings."""

import dataclasses
import json
import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import yaml
from autoshard_models import train_step
from autoshard_models.gpt import GPT, GPTConfig
from autoshard_models.gpt_linen import LinenGPTConfig
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from typer.testing import CliRunner

import autoshard
from autoshard.cli import app
from autoshard.compiler.schedule import Schedule
from autoshard.errors import ExportError, FileFormatError, PinError, PlanMismatchError
from autoshard.plans.export import Form, exported, read_names
from autoshard.plans.maxtext import maxtext_yaml
from autoshard.plans.program_plan import PlannedTensor

CONFIGS = pathlib.Path(__file__).parents[2] / "configs"
SIZES = {"vocab_size": 256, "context_length": 16, "num_layers": 2, "num_heads": 2, "embed_dim": 32}
MESH = {"data": 4, "tensor": 2}


@dataclasses.dataclass(frozen=True)
class Planned:
    """A GPT's plan, and the abstract state that it was made for."""

    plan: autoshard.Plan
    state: object


def planned(config: GPTConfig, cluster, *stack: None) -> Planned:
    """Pins make a moment differ from its parameter, whatever the solver chooses; `stack` pads for scanned layers."""
    pins = {
        "state.params.*.mlp.up.kernel": PartitionSpec(*stack, None, "tensor"),
        "*.mu.*.mlp.up.kernel": PartitionSpec(*stack, "data"),
    }
    functions = train_step.build(config, train_step.adamw())
    state, batch = jax.eval_shape(functions.init, 0), train_step.batch_shapes(16, 16)
    plan = autoshard.plan(functions.step, state, batch, cluster=cluster, mesh=MESH, donate_argnums=0, pins=pins)
    return Planned(plan, state)


@pytest.fixture(scope="module")
def gpt(cluster) -> Planned:
    return planned(GPTConfig(**SIZES), cluster)


@pytest.fixture(scope="module")
def train_gpt():
    """The training step that `gpt` plans."""
    return train_step.build(GPTConfig(**SIZES), train_step.adamw()).step


@pytest.fixture(scope="module")
def linen(cluster) -> Planned:
    return planned(LinenGPTConfig(**SIZES, scan_layers=True), cluster, None)


def same(found, expected: NamedSharding, rank: int) -> bool:
    return found.mesh == expected.mesh and found.is_equivalent_to(expected, rank)


def as_rules(document: dict) -> list:
    """The rules of an exported file as anyone would read them."""
    return [(name, tuple(axes) or None) for name, axes in document["logical_axis_rules"]]


@pytest.mark.parametrize("family", ["gpt", "linen"])
def test_linen_makes_the_plan_s_shardings_of_all_arguments(family, request):
    """Optimizer moments that are split otherwise than their parameters included."""
    made = request.getfixturevalue(family)
    axes = autoshard.logical_axes(made.plan)
    shardings = nn.logical_to_mesh_sharding(axes.specs(made.state, "state"), made.plan.mesh(), axes.rules)
    expected = made.plan.in_shardings(argument=0)
    checks = jax.tree.map(lambda f, e, s: same(f, e, len(s.shape)), shardings, expected, made.state)
    assert jax.tree.all(checks) and len(jax.tree.leaves(checks)) > 30
    assert any(a.entries != b.entries for a, b in pairs_of_parameter_and_moment(made.plan))


def pairs_of_parameter_and_moment(plan: autoshard.Plan):
    named = {a.name: a for a in plan.arguments}
    for name, a in named.items():
        head, _, inner = name.partition(".mu.")
        if inner:
            yield named[f"state.params.{inner}"], a


def test_nnx_makes_the_plan_s_shardings(gpt):
    """A model whose variables bear the names, read by NNX's own function under the exported rules."""
    axes = autoshard.logical_axes(gpt.plan)
    model = nnx.eval_shape(lambda: GPT(GPTConfig(**SIZES), rngs=nnx.Rngs(0)))
    planned = {a.name: a for a in gpt.plan.arguments}
    count = 0
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        variable.set_metadata(out_sharding=axes.names_of("state.params." + ".".join(map(str, path))))
    mesh = gpt.plan.mesh()
    with nnx.logical_axis_rules(axes.rules):
        found = nnx.get_named_sharding(nnx.state(model, nnx.Param), mesh)
    for path, variable in nnx.to_flat_state(found):
        tensor = planned["state.params." + ".".join(map(str, path))]
        spec = PartitionSpec(*(e or None for e in tensor.entries))
        assert same(variable.get_value(), NamedSharding(mesh, spec), len(tensor.shape)), tensor
        count += 1
    assert count == sum(name.startswith("state.params.") for name in planned)


@pytest.mark.parametrize("family", ["gpt", "linen"])
def test_both_readings_of_the_rules_agree(family, request):
    """In any order of the rules: Linen's priorities and NNX's mapping then have nothing to disagree on."""
    axes = autoshard.logical_axes(request.getfixturevalue(family).plan)
    names = [name for name, _ in axes.rules]
    assert len(set(names)) == len(names)
    for rules in (axes.rules, axes.rules[::-1]):
        for _, tensor in axes.names:
            linen = nn.logical_to_mesh_axes(tensor, rules)
            variable = nnx.Param(jnp.zeros((1,) * len(tensor)))
            variable.set_metadata(out_sharding=tensor)
            with nnx.logical_axis_rules(rules):
                assert nnx.get_partition_spec(variable).get_value() == linen


def test_files_are_read_back_by_anyone(gpt, tmp_path):
    axes = autoshard.logical_axes(gpt.plan)
    path = tmp_path / "rules.yaml"
    path.write_text(exported(gpt.plan, Form.FLAX_RULES))
    assert autoshard.LogicalAxes.load(path) == axes
    document = yaml.safe_load(path.read_text())
    assert tuple(as_rules(document)) == tuple((n, (a,) if isinstance(a, str) else a) for n, a in axes.rules)
    path.write_text("format: autoshard-logical-axes\nversion: 1\n")
    with pytest.raises(FileFormatError, match="mesh"):
        autoshard.LogicalAxes.load(path)


def small(*tensors: tuple[str, tuple[int, ...], tuple]) -> autoshard.Plan:
    """A plan of which only the arguments matter."""
    axes = (("data", 4), ("tensor", 2))
    arguments = tuple(PlannedTensor(name, shape, "float32", entries) for name, shape, entries in tensors)
    rest = dict.fromkeys(("estimate", "certificate"))
    return autoshard.Plan(
        "p", "c", "d", axes, "", arguments, (), (), (), (), (), (0,), Schedule.LEAST_MEMORY, None, **rest
    )


D, T, W = ("data",), ("tensor",), ()


def test_layers_that_differ_have_names_of_their_own():
    plan = small(("s.params.0.w", (8, 8), (D, W)), ("s.params.1.w", (8, 8), (D, W)), ("s.params.2.w", (8, 8), (W, D)))
    axes = autoshard.logical_axes(plan)
    assert [axes.names_of(f"s.params.{i}.w") for i in range(3)] == [("w.0", "w.1")] * 2 + [("w~2.0", "w~2.1")]
    assert axes.rules == (("w.0", "data"), ("w.1", None), ("w~2.0", None), ("w~2.1", "data"))


def test_moments_bear_their_parameter_s_names_where_they_are_planned_alike():
    moments = [(f"s.opt.0.{m}.w", (8, 8), (W, D)) for m in ("mu", "nu")]
    plan = small(("s.params.w", (8, 8), (D, W)), ("s.opt.0.trace.w", (8, 8), (D, W)), *moments)
    axes = autoshard.logical_axes(plan)
    assert axes.names_of("s.opt.0.trace.w") == axes.names_of("s.params.w") == ("w.0", "w.1")
    assert axes.names_of("s.opt.0.mu.w") == axes.names_of("s.opt.0.nu.w") == ("opt.mu.w.0", "opt.mu.w.1")
    with pytest.raises(ExportError, match=r"`s.opt.\*.mu.w`.*planned as \(-, data\), by the rules \(data, -\)"):
        autoshard.logical_axes(plan, inherit=True)


NAMES = {"*.up": ("embed", "mlp"), "*.down": ("mlp", "embed")}


def test_names_that_the_model_has():
    plan = small(("s.params.up", (8, 8), (W, T)), ("s.params.down", (8, 8), (T, W)))
    assert autoshard.logical_axes(plan, NAMES).rules == (("embed", None), ("mlp", "tensor"))


def test_two_layouts_of_one_name_are_told_or_the_nearest_taken():
    """`mlp` is split in the larger tensor, whole in the smaller one."""
    plan = small(("s.params.up", (8, 16), (W, T)), ("s.params.down", (16, 4), (W, W)))
    with pytest.raises(ExportError) as caught:
        autoshard.logical_axes(plan, NAMES)
    message = str(caught.value)
    assert "`s.params.down` (1, named mlp, embed) is planned as (-, -), by the rules (tensor, -)" in message
    assert "{'s.params.down': P('tensor'" in message
    axes = autoshard.logical_axes(plan, NAMES, nearest=True)
    assert axes.rules == (("embed", None), ("mlp", "tensor"))
    assert [d.path for d in axes.deviations] == ["s.params.down"]


def test_the_nearest_rules_split_no_tensor_twice_nor_unevenly():
    """Both names want `data` elsewhere, so one of them must do without in `both`; 6 rows cannot be split by 4."""
    names = {"*.both": ("a", "b"), "*.a": ("a", None), "*.b": (None, "b"), "*.odd": ("a",)}
    one, two = ("s.params.a", (64, 8), (D, W)), ("s.params.b", (8, 128), (W, D))
    both = autoshard.logical_axes(small(one, two, ("s.params.both", (64, 128), (W, W))), names, nearest=True)
    assert both.rules == (("a", None), ("b", None)), "the largest tensor decides"
    both = autoshard.logical_axes(small(one, two, ("s.params.both", (8, 8), (W, W))), names, nearest=True)
    assert both.rules == (("a", None), ("b", "data"))
    odd = autoshard.logical_axes(small(one, two, ("s.params.odd", (6,), (W,))), names, nearest=True)
    assert odd.rules == (("a", None), ("b", "data"))
    assert [d.path for d in odd.deviations] == ["s.params.a"]


@pytest.mark.parametrize("names", [{"*.up": ("a", "b", "c")}, {"*.up": ("a", "a")}])
def test_names_that_fit_no_tensor(names):
    with pytest.raises(ExportError, match="Each dimension has at most one name"):
        autoshard.logical_axes(small(("s.params.up", (8, 8), (W, T))), names)


def test_a_path_that_the_plan_lacks(gpt):
    with pytest.raises(ExportError, match="no argument `state.params.nothing`"):
        autoshard.logical_axes(gpt.plan).names_of("state.params.nothing")


def test_a_plan_with_the_pins_of_the_nearest_rules_keeps_to_the_names(gpt, train_gpt, cluster):
    names = read_names(CONFIGS / "names" / "gpt_maxtext.yaml")
    nearest = autoshard.logical_axes(gpt.plan, names, inherit=True, nearest=True)
    assert nearest.deviations, "the fixture's pins contradict Flax's inheritance"
    batch = train_step.batch_shapes(16, 16)
    kept = autoshard.plan(train_gpt, gpt.state, batch, cluster=cluster, mesh=MESH, donate_argnums=0, pins=nearest.pins)
    again = autoshard.logical_axes(kept, names, inherit=True)
    assert dict(again.rules) == dict(nearest.rules)
    parameters = [a.name for a in kept.arguments if a.shape and a.name.startswith("state.params.")]
    known = {name for row in names.values() for name in row}
    assert all(set(again.names_of(path)) <= known for path in parameters), "every parameter has MaxText's names"


# ---- MaxText


def megatron_file(tmp_path: pathlib.Path) -> pathlib.Path:
    """A file for weights split by columns and rows, whose rows also lie over the data axis."""
    names = {"*.up": ("embed", "mlp"), "*.query": ("embed", "heads", "kv"), "*.table": ("vocab", "embed")}
    plan = small(
        ("s.params.up", (8, 8), (D, T)),
        ("s.params.query", (8, 4, 2), (D, T, W)),
        ("s.params.table", (8, 8), (T, D)),
        ("b.inputs", (16, 8), (D, W)),
    )
    path = tmp_path / "megatron.yml"
    path.write_text(maxtext_yaml(plan, names))
    return path


def test_maxtext_files():
    names = {"*.up": ("embed", "mlp")}
    batch = ("b.inputs", (16, 8), (("data", "tensor"), W))
    document = yaml.safe_load(maxtext_yaml(small(("s.params.up", (8, 8), (D, T)), batch), names))
    assert document["base_config"] == "base.yml" and document["override_logical_axis_rules"] is True
    assert document["mesh_axes"] == ["data", "tensor"] and document["data_sharding"] == [["data", "tensor"]]
    sizes = {name: size for name, size in document.items() if name.startswith("ici_")}
    assert sizes == {"ici_fsdp_parallelism": 1, "ici_data_parallelism": 4, "ici_tensor_parallelism": 2}
    rules = document["logical_axis_rules"]
    assert ["embed", ["data"]] in rules and ["mlp", ["tensor"]] in rules
    assert ["activation_batch", ["data", "tensor"]] in rules and ["activation_length", []] in rules
    assert ["activation_mlp", []] in rules  # its axis splits the batch already
    assert len({name for name, _ in rules}) == len(rules)
    assert nn.logical_to_mesh_axes(("embed", "mlp"), as_rules(document)) == PartitionSpec("data", "tensor")


def test_activations_in_maxtext_follow_the_weights_that_make_them(tmp_path):
    """The tuples are those that MaxText's attention, MLP and output layer constrain their activations by."""
    rules = as_rules(yaml.safe_load(megatron_file(tmp_path).read_text()))
    specs = {
        ("activation_batch_attn", "activation_length_attn", "activation_heads", "activation_kv"): (
            "data",
            None,
            "tensor",
        ),
        ("activation_kv_batch", "activation_length_attn", "activation_kv_heads", "activation_kv_head_dim"): (
            "data",
            None,
            "tensor",
        ),
        ("activation_batch", "activation_length", "activation_mlp"): ("data", None, "tensor"),
        ("activation_embed_and_logits_batch", "activation_length", "activation_vocab"): ("data", None, "tensor"),
        ("activation_batch", "activation_norm_length", "activation_embed"): ("data",),
        ("embed", "q_heads", "kv"): ("data", "tensor"),
        ("embed", "kv_heads", "kv_head_dim"): ("data", "tensor"),
    }
    for names, expected in specs.items():
        found = [*nn.logical_to_mesh_axes(names, rules)]
        while found and found[-1] is None:
            found.pop()
        assert tuple(found) == expected, names


def test_maxtext_reads_its_files_itself(tmp_path):
    pyconfig = pytest.importorskip("maxtext.configs.pyconfig", reason="MaxText is not installed")
    common = ["run_name=x", f"base_output_directory={tmp_path}", "dataset_type=synthetic", "hardware=cpu"]
    config = pyconfig.initialize(["train", str(megatron_file(tmp_path)), *common, "skip_jax_distributed_system=true"])
    assert list(config.mesh_axes) == ["data", "tensor"] and list(config.ici_parallelism) == [4, 2]
    rules = as_rules({"logical_axis_rules": config.logical_axis_rules})
    assert nn.logical_to_mesh_axes(("embed", "mlp"), rules) == PartitionSpec("data", "tensor")
    assert not any("fsdp" in (axes or ()) for _, axes in rules)  # nothing of MaxText's own table is left


def test_maxtext_s_optimizer_state_follows_its_parameters(gpt):
    entries = {a.name: a.entries for a in gpt.plan.arguments}
    kernel = "blocks.0.mlp.up.kernel"
    own = next(e for name, e in entries.items() if name == f"state.params.{kernel}")
    moments = next(e for name, e in entries.items() if ".mu." in name and name.endswith(kernel))
    assert own != moments, "the plan has what such a file cannot say"
    with pytest.raises(ExportError, match="mu.blocks"):
        maxtext_yaml(gpt.plan)
    text = maxtext_yaml(gpt.plan, nearest=True)
    assert "# DEVIATES: `state.opt_state.*.*.mu.blocks.*.mlp.up.kernel`" in text
    rules = yaml.safe_load(text)["logical_axis_rules"]
    for number, axes in enumerate(own):
        assert [f"blocks.mlp.up.kernel.{number}", list(axes)] in rules


def test_plans_that_no_maxtext_file_holds():
    plan = small(("s.params.up", (8, 8), (W, T)), ("b.inputs", (16, 8), (D, W)))
    with pytest.raises(ExportError, match="has `rows`"):
        maxtext_yaml(dataclasses.replace(plan, axes=(("rows", 4), ("tensor", 2))))
    with pytest.raises(ExportError, match="no argument besides its state"):
        maxtext_yaml(dataclasses.replace(plan, arguments=plan.arguments[:1]))
    other = dataclasses.replace(plan, arguments=(*plan.arguments, PlannedTensor("b.targets", (16, 8), "int32", (W, W))))
    with pytest.raises(ExportError, match="`b.inputs`|`b.targets`"):
        maxtext_yaml(other)


# ---- shardings


def test_named_shardings_in_the_structure_of_the_arguments(gpt, tmp_path):
    state, batch = gpt.plan.in_shardings()
    assert jax.tree.structure(state) == jax.tree.structure(gpt.state)
    gpt.plan.save(tmp_path / "plan.json")
    loaded = autoshard.Plan.load(tmp_path / "plan.json")
    assert loaded.in_shardings(like=gpt.state, argument=0) == state == gpt.plan.in_shardings(argument=0)
    assert loaded.in_shardings(argument=1)["batch.inputs"] == batch["inputs"]
    with pytest.raises(PlanMismatchError, match="leaf 0"):
        loaded.in_shardings(like={"w": jax.ShapeDtypeStruct((3,), jnp.float32)}, argument=0)


def test_shardings_as_json(gpt):
    document = json.loads(exported(gpt.plan, Form.SHARDINGS))
    mesh = jax.make_mesh(
        tuple(n for _, n in document["mesh"]),
        tuple(a for a, _ in document["mesh"]),
        axis_types=(jax.sharding.AxisType.Auto,) * len(document["mesh"]),
    )
    expected = jax.tree.leaves(gpt.plan.in_shardings())
    for row, sharding in zip(document["arguments"], expected, strict=True):
        made = NamedSharding(mesh, PartitionSpec(*(tuple(axes) or None for axes in row["axes"])))
        assert made.is_equivalent_to(sharding, len(row["shape"]))


def test_the_command(gpt, tmp_path):
    gpt.plan.save(tmp_path / "plan.json")
    run = lambda *args: CliRunner().invoke(app, ["export", str(tmp_path / "plan.json"), "--to", *map(str, args)])
    for form in Form:
        shown = run(form.value, "--nearest")
        assert shown.exit_code == 0 and shown.stdout == exported(gpt.plan, form, nearest=True)
    names = tmp_path / "names.yaml"
    names.write_text("'state.params.*.mlp.up.kernel': [embed, mlp]\n")
    assert read_names(names) == {"state.params.*.mlp.up.kernel": ("embed", "mlp")}
    done = run("flax-rules", "--names", names, "--out", tmp_path / "rules.yaml")
    assert done.exit_code == 0 and done.stdout == ""
    assert ("mlp", "tensor") in autoshard.LogicalAxes.load(tmp_path / "rules.yaml").rules
    refused = run("maxtext")
    assert refused.exit_code == 2 and "--nearest" in refused.stderr
    assert "flax-rules, maxtext, shardings" in run("torch").stderr
    names.write_text("[1, 2]")
    assert "path patterns" in " ".join(run("flax-rules", "--names", names).stderr.split())


# ---- pins


RULES = (("embed", "data"), ("mlp", ("data", "tensor")), ("mlp", "tensor"), ("heads", None))


class Layer(nn.Module):
    """One Linen layer with logical names, and one with mesh axes."""

    @nn.compact
    def __call__(self, x):
        logical = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "mlp"))
        direct = nn.with_partitioning(nn.initializers.ones, (None, "tensor"))
        return nn.Dense(16, kernel_init=direct, name="two")(nn.Dense(8, kernel_init=logical, name="one")(x))


def test_linen_s_names_become_pins():
    """`mlp` would use `data`, which `embed` has already: Linen goes on to the next rule of the name."""
    boxed = jax.eval_shape(Layer().init, jax.random.key(0), jnp.ones((2, 16)))
    pins = autoshard.pins_from_logical_rules(boxed, RULES, "variables")
    assert pins == {
        "variables.params.one.kernel": PartitionSpec("data", "tensor"),
        "variables.params.two.kernel": PartitionSpec(None, "tensor"),
    }
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    flax = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, RULES)["params"]
    assert flax["one"]["kernel"].spec == pins["variables.params.one.kernel"]


def test_the_model_s_own_names_are_exported(cluster):
    """A kernel of three dimensions with two names, as Linen's attention has: what is behind them stays whole."""

    class Heads(nn.Module):
        @nn.compact
        def __call__(self, x):
            init = nn.with_logical_partitioning(nn.initializers.ones, ("embed", "heads"))
            return nn.DenseGeneral((4, 8), kernel_init=init, use_bias=False)(x)

    boxed = jax.eval_shape(Heads().init, jax.random.key(0), jnp.ones((32, 16)))
    names = autoshard.logical_names(boxed, "variables")
    path = "variables.params.DenseGeneral_0.kernel"
    assert names == {path: ("embed", "heads", None), f"{path}.value": ("embed", "heads", None)}
    pins = {path: PartitionSpec(None, "tensor")}
    forward = lambda variables, x: Heads().apply(variables, x)
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    plan = autoshard.plan(forward, nn.meta.unbox(boxed), x, cluster=cluster, mesh=MESH, pins=pins)
    axes = autoshard.logical_axes(plan, names)
    assert {"embed": None, "heads": "tensor"}.items() <= dict(axes.rules).items()
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    flax = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, axes.rules)
    assert same(
        flax["params"]["DenseGeneral_0"]["kernel"],
        plan.in_shardings(argument=0)["params"]["DenseGeneral_0"]["kernel"],
        3,
    )
    with pytest.raises(PinError, match="several|names of mesh axes"):
        several = nn.Partitioned(jnp.ones((8, 8)), names=(("data", "tensor"), None))
        autoshard.logical_names({"w": several})
    with pytest.raises(PinError, match="Nothing in the tree"):
        autoshard.logical_names({"w": jnp.ones(3)})


def nnx_layer(*names):
    init = nnx.with_partitioning(nnx.initializers.ones, names)
    with nnx.use_eager_sharding(False):
        return nnx.state(nnx.eval_shape(lambda: nnx.Linear(16, 8, kernel_init=init, rngs=nnx.Rngs(0))))


def test_nnx_s_names_become_pins():
    pins = autoshard.pins_from_logical_rules(nnx_layer("heads", "mlp"), (RULES[3], ("mlp", ["data", "tensor"])), "p")
    assert pins == {"p.kernel": PartitionSpec(None, ("data", "tensor"))}


def test_what_no_pin_can_say():
    with pytest.raises(PinError, match="several"):
        autoshard.pins_from_logical_rules(nnx_layer("embed", "mlp"), RULES)
    with pytest.raises(PinError, match="`data` splits two"):
        autoshard.pins_from_logical_rules(nnx_layer("embed", "mlp"), RULES[:2])
    with pytest.raises(PinError, match="Nothing in the tree"):
        autoshard.pins_from_logical_rules({"w": jnp.ones(3)}, RULES)


def test_pins_are_kept_by_the_planner(cluster):
    boxed = jax.eval_shape(Layer().init, jax.random.key(0), jnp.ones((32, 16)))
    variables = nn.meta.unbox(boxed)
    pins = autoshard.pins_from_logical_rules(boxed, RULES, "variables")
    forward = lambda variables, x: Layer().apply(variables, x)
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    plan = autoshard.plan(forward, variables, x, cluster=cluster, mesh=MESH, pins=pins)
    assert plan.in_specs[0]["params"]["one"]["kernel"] == PartitionSpec("data", "tensor")


def test_what_is_exported_can_be_pinned_again(gpt, cluster):
    """Names put on an NNX model, read back as pins, are the plan's layouts."""
    axes = autoshard.logical_axes(gpt.plan)
    state = nnx.state(nnx.eval_shape(lambda: GPT(GPTConfig(**SIZES), rngs=nnx.Rngs(0))), nnx.Param)
    for path, variable in nnx.to_flat_state(state):
        variable.set_metadata(out_sharding=axes.names_of("state.params." + ".".join(map(str, path))))
    pins = autoshard.pins_from_logical_rules(state, axes.rules, "state.params")
    entries = {a.name: a.entries for a in gpt.plan.arguments}
    as_entries = lambda spec: tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)
    assert {name: as_entries(spec) for name, spec in pins.items()} == {n: entries[n] for n in pins}


def test_boxes_in_the_arguments_are_read_under_the_rules_in_force(cluster):
    boxed = jax.eval_shape(Layer().init, jax.random.key(0), jnp.ones((32, 16)))
    x = jax.ShapeDtypeStruct((32, 16), jnp.float32)
    forward = lambda variables, x: Layer().apply(variables, x)
    with nn.logical_axis_rules(RULES):
        plan = autoshard.plan(forward, boxed, x, cluster=cluster, mesh=MESH)
    entries = {a.name: a.entries for a in plan.arguments}
    assert entries["variables.params.one.kernel.value"] == (("data",), ("tensor",))
    free = autoshard.plan(forward, boxed, x, cluster=cluster, mesh=MESH)  # no rules: only mesh axes demand anything
    assert {a.name: a.entries for a in free.arguments}["variables.params.two.kernel.value"] == ((), ("tensor",))
    variables = nnx_layer("heads", "mlp")
    with nnx.logical_axis_rules((("heads", None), ("mlp", ("data", "tensor")))):
        plan = autoshard.plan(lambda p, x: x @ p["kernel"].get_value(), variables, x, cluster=cluster, mesh=MESH)
    assert {a.name: a.entries for a in plan.arguments}["p.kernel.value"] == ((), ("data", "tensor"))
