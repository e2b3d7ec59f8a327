"""Flax NNX modules as people pass them: a planned step changes them in place as `nnx.jit` does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import autoshard
from autoshard.errors import PlanMismatchError, TraceError

ON_BOTH = {"data": 4, "tensor": 2}
BATCH = {"x": np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32), "y": np.ones((16, 16), np.float32)}


class Block(nnx.Module):
    """A module with all that a step may change: random numbers, averages, and a weight that two layers share."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.last.kernel = self.first.kernel
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(self.norm(self.first(x))))


def make() -> tuple[Block, nnx.Optimizer, nnx.MultiMetric]:
    model = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    return model, optimizer, nnx.MultiMetric(loss=nnx.metrics.Average("loss"))


def loss_fn(model: Block, batch: dict) -> jax.Array:
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train_step(model, optimizer, metrics, batch):
    """As in Flax's tutorials."""
    loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
    metrics.update(loss=loss)
    optimizer.update(model, grads)


def assert_same(ours: object, theirs: object) -> None:
    def numbers(tree: object) -> list[jax.Array]:
        leaves = jax.tree.leaves(nnx.state(tree))
        return [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]

    for one, other in zip(numbers(ours), numbers(theirs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_step_of_the_tutorial_runs_as_under_nnx_jit():
    ours, theirs = make(), make()
    plan = autoshard.plan(train_step, *ours, BATCH, mesh=ON_BOTH)
    assert {a.name.split(".")[0] for a in plan.arguments} == {"model", "optimizer", "metrics", "batch"}
    assert not any("last.kernel" in a.name for a in plan.arguments)  # what is shared is one array
    step, reference = plan.jit(train_step), nnx.jit(train_step)
    for _ in range(3):
        assert step(*ours, BATCH) is None
        reference(*theirs, BATCH)
    assert_same(ours, theirs)
    assert ours[0].last.kernel is ours[0].first.kernel
    assert ours[0].first.kernel[...].sharding.mesh.axis_names == ("data", "tensor")


@pytest.mark.parametrize(
    "bind",
    [
        lambda model, optimizer, metrics: nnx.cached_partial(nnx.jit(train_step), model, optimizer, metrics),
        lambda model, *others: functools.partial(nnx.cached_partial(nnx.jit(train_step), model), *others),
    ],
)
def test_modules_that_are_bound_to_a_step_are_arguments(bind):
    """What is changed in place cannot be a constant of the program, whoever passes it."""
    ours, theirs = make(), make()
    own, reference = bind(*ours), nnx.jit(train_step)
    plan = autoshard.plan(own, BATCH, mesh=ON_BOTH, donate_argnums=0)
    assert {a.name.split(".")[0] for a in plan.arguments} == {"model", "optimizer", "metrics", "batch"}
    assert plan.donate_argnums == (3,)  # as of `jax.jit`, of what is still to be passed
    step = plan.jit(own)
    for _ in range(2):
        assert step(dict(BATCH)) is None
        reference(*theirs, BATCH)
    assert_same(ours, theirs)


def test_what_is_bound_beside_a_module_is_a_constant():
    def scaled(model: nnx.Linear, times: int, x: jax.Array, *, by: float) -> jax.Array:
        return jnp.concatenate([model(x) * by] * times)

    model, x = nnx.Linear(16, 8, rngs=nnx.Rngs(0)), jnp.ones((8, 16))
    own = functools.partial(scaled, model, 3, by=2.0)
    plan = autoshard.plan(own, x, mesh=ON_BOTH)
    assert [a.name.split(".")[0] for a in plan.arguments] == ["model", "model", "x"]
    np.testing.assert_allclose(plan.jit(own)(x), own(x), rtol=1e-6)


def test_what_the_program_consists_of_may_change():
    """Attributes, new variables, and parts of modules that are returned."""

    def step(model, batch):
        model.train()
        if not hasattr(model, "seen"):
            model.seen = nnx.Variable(jnp.zeros(()))
        model.seen[...] += len(batch["x"])
        return loss_fn(model, batch), model.first

    ours, theirs = make()[0], make()[0]
    ours.eval(), theirs.eval()
    run, reference = autoshard.plan(step, ours, BATCH, mesh=ON_BOTH).jit(step), nnx.jit(step)
    (loss, first), (expected, _) = run(ours, BATCH), reference(theirs, BATCH)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert first is ours.first and not ours.dropout.deterministic and float(ours.seen[...]) == 16
    assert_same(ours, theirs)
    with pytest.raises(PlanMismatchError, match="model.seen"):  # another program, with one variable more
        run(ours, BATCH)


def test_a_step_may_return_what_it_changes():
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss, {"model": model, "optimizer": optimizer}

    model, optimizer, _ = make()
    plan = autoshard.plan(nnx.jit(step, donate_argnums=(0, 1)), model, optimizer, BATCH, mesh=ON_BOTH)
    assert plan.donate_argnums == (0, 1)
    _, returned = plan.jit(step)(model, optimizer, BATCH)
    assert returned["model"] is model and returned["optimizer"] is optimizer


def test_modules_by_shape_are_planned_and_made_where_they_belong():
    abstract = nnx.eval_shape(make)
    pins = {"model.first.kernel*": jax.sharding.PartitionSpec("tensor")}
    plan = autoshard.plan(train_step, *abstract, jax.eval_shape(lambda: BATCH), mesh=ON_BOTH, pins=pins)
    model = plan.init(lambda: Block(nnx.Rngs(0)))
    assert isinstance(model, Block) and model.first.kernel[...].sharding.spec == jax.sharding.PartitionSpec("tensor")
    assert_same(model, make()[0])
    _, optimizer, metrics = make()
    plan.jit(train_step)(model, optimizer, metrics, BATCH)

    def in_a_pytree(state, batch):
        return {"model": nnx.state(state["model"]), "step": state["step"] + 1}, loss_fn(state["model"], batch)

    made = autoshard.plan(in_a_pytree, {"model": abstract[0], "step": 0}, BATCH, mesh=ON_BOTH).init(
        lambda: {"model": Block(nnx.Rngs(0)), "step": jnp.int32(3)}
    )
    assert isinstance(made["model"], Block) and int(made["step"]) == 3
    assert plan.jit(train_step).lower().compile() is not None  # for the planned shapes
    assert plan.check(train_step, (*abstract, BATCH)).graph.arguments
    assert "train_step" in str(autoshard.compare(train_step, *abstract, BATCH, mesh=ON_BOTH, strategies=()))


def test_a_saved_plan_runs_modules(tmp_path):
    ours, theirs = make(), make()
    autoshard.plan(train_step, *ours, BATCH, mesh=ON_BOTH).save(tmp_path / "plan.json")
    autoshard.load(tmp_path / "plan.json").jit(train_step)(*ours, BATCH)
    nnx.jit(train_step)(*theirs, BATCH)
    assert_same(ours, theirs)


def test_a_state_that_is_merged_inside_is_returned_or_refused():
    """Merging keeps the variables that it is given, so that a module made of them changes the argument."""
    graphdef, state = nnx.split(make()[0])

    def returns(state, x):
        model = nnx.merge(graphdef, state)
        return model(x), nnx.state(model)

    _, changed = autoshard.plan(returns, state, BATCH["x"], mesh=ON_BOTH).jit(returns)(state, BATCH["x"])
    assert not np.allclose(changed["norm"]["mean"][...], state["norm"]["mean"][...])
    with pytest.raises(TraceError, match=r"`loses` changes its arguments in place.*norm\.mean.*return its new"):

        def loses(state, x):
            return nnx.merge(graphdef, state)(x)

        autoshard.plan(loses, state, BATCH["x"], mesh=ON_BOTH)


def test_an_annotation_that_an_axis_does_not_divide_keeps_the_dimension_whole():
    class Narrow(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.wide = nnx.Linear(16, 16, kernel_metadata={"out_sharding": (None, "tensor")}, rngs=rngs)
            self.narrow = nnx.Linear(16, 1, kernel_metadata={"out_sharding": (None, "tensor")}, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.narrow(self.wide(x))

    def step(model, x):
        return model(x)

    axes = (jax.sharding.AxisType.Auto,) * 2
    with jax.set_mesh(jax.make_mesh(tuple(ON_BOTH.values()), tuple(ON_BOTH), axis_types=axes)):
        model = nnx.eval_shape(lambda: Narrow(nnx.Rngs(0)))
        plan = autoshard.plan(step, model, BATCH["x"], mesh=ON_BOTH)
    entries = {a.name: a.entries for a in plan.arguments}
    assert entries["model.wide.kernel.value"] == ((), ("tensor",))
    assert entries["model.narrow.kernel.value"] == ((), ())
    (told,) = plan.warnings
    assert (
        "`model.narrow.kernel.value` with shape (16, 1) is annotated to be split over tensor along dimension 1" in told
    )
