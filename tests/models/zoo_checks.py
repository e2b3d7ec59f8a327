"""What every family must satisfy: it learns, its state keeps its types, and planned steps equal plain ones."""

import collections
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from autoshard_models.inference import build_inference
from autoshard_models.train_step import TrainFunctions
from flax import nnx
from zoo_programs import Program

import autoshard
from autoshard import baselines
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup
from autoshard.strategies.make import Subject

MESHES = {
    "8": {"data": 8},
    "2x4": {"data": 2, "tensor": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}
"""Every mesh that steps are checked on, by name."""
STEPS = 3
TOLERANCE = 5e-4
"""Largest difference of a planned step from the plain one, as a share of the scale of a leaf; see `deviations`."""
OPTIONS = autoshard.PlanOptions(relative_gap=0.05, mesh_limit_s=30, cache=False)
"""Plans that are good enough to be interesting."""


def slow_device_cluster() -> Cluster:
    """Eight devices for which splitting pays at any size: arithmetic is slow and links cost nothing to start."""
    device = DeviceType("slow", {"float32": 1e9}, 10**9, 1e9, 0.0, "made up for this test")
    link = Link(1e-12, 1e9, 0, "made up for this test")
    return Cluster("slow", (NodeGroup("slow", device, 1, 8, link),))


def tokens_of(vocab_size: int, batch_size: int, length: int, seed: int = 0) -> dict[str, jax.Array]:
    """A batch of a language model."""
    tokens = np.random.default_rng(seed).integers(vocab_size, size=(batch_size, length + 1), dtype=np.int32)
    return {"inputs": jnp.asarray(tokens[:, :-1]), "targets": jnp.asarray(tokens[:, 1:])}


def images_of(config: Any, seed: int = 0, batch_size: int = 8) -> dict[str, jax.Array]:
    """A batch of labelled images."""
    rng, size = np.random.default_rng(seed), config.image_size
    images = rng.normal(size=(batch_size, size, size, config.num_channels)).astype(np.float32)
    labels = rng.integers(config.num_classes, size=batch_size, dtype=np.int32)
    return {"images": jnp.asarray(images), "labels": jnp.asarray(labels)}


def rngs() -> nnx.Rngs:
    """Random numbers for the parameters of a module."""
    return nnx.Rngs(0)


def count(tree: Any) -> int:
    """Numbers in a tree of arrays or shapes."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def num_params(functions: TrainFunctions) -> int:
    """Parameters of a model, found without making them."""
    return count(jax.eval_shape(functions.init, 0).params)


def numbers(tree: Any) -> list[np.ndarray]:
    """The leaves as arrays; PRNG keys as their words."""
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return [np.asarray(plain(x)) for x in jax.tree.leaves(tree)]


def assert_learns(functions: TrainFunctions, batch: Any, steps: int = 60, share: float = 0.7) -> None:
    """The last ten losses on one batch are on average below `share` of the first; the state keeps structure and types.

    Compiles what `reference_of` compiles.
    """
    step, state = jax.jit(functions.step), jax.jit(functions.init)(0)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and np.mean(losses[-10:]) < share * losses[0], losses
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    assert int(state.step) == steps


class Reference(NamedTuple):
    """A program run without any sharding.

    Attributes:
        subject: the step as the planner reads it, traced once for all plans.
        first: the state before the first step.
        batches: one for each step.
        trail: the state and the metrics after each step, as `numbers`.
    """

    program: Program
    subject: Subject
    first: Any
    batches: list[Any]
    trail: list[dict[str, dict[str, np.ndarray]]]


def reference_of(program: Program) -> Reference:
    """Traces a program and runs its first steps."""
    init, step = jax.jit(program.functions.init), jax.jit(program.functions.step)
    first, batches = init(0), [program.batch(seed) for seed in range(STEPS)]
    subject = baselines.prepare_subject(
        program.functions.step, first, batches[0], cluster=slow_device_cluster(), donate_argnums=0
    )
    return Reference(program, subject, first, batches, _trail(step, first, batches))


def _trail(step: Callable[..., Any], state: Any, batches: list[Any]) -> list[dict[str, dict[str, np.ndarray]]]:
    """What each step makes: for each part of state and metrics, its leaves by path."""
    made = []
    for batch in batches:
        state, metrics = step(state, batch)
        parts = {name: getattr(state, name) for name in ("params", "opt_state", "mutable")}
        parts |= {"metrics": metrics, "rest": state.replace(**dict.fromkeys(parts))}
        paths = {part: [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)]
                 for part, tree in parts.items()}  # fmt: skip
        made.append({part: dict(zip(paths[part], numbers(tree), strict=True)) for part, tree in parts.items()})
    return made


class Deviation(NamedTuple):
    """The largest difference in one part of what a step makes, and the leaf where it is."""

    share: float
    leaf: str


def deviations(plan: autoshard.Plan, reference: Reference) -> dict[str, Deviation]:
    """How far planned steps are from plain ones; see `deviations_of`."""
    return deviations_of(plan.jit(reference.program.functions.step), reference)


def deviations_of(step: Callable[..., Any], reference: Reference) -> dict[str, Deviation]:
    """How far `step` is from the plain one, by part: `metrics`, `params`, `opt_state`, `mutable`, `rest`.

    The measure is the largest |difference| in a leaf, divided by the scale of the leaf: its largest number, but no less
    than a thousandth of the largest one in all leaves of the same kind (parameters, first moments, and so on). Leaves
    that are not floats must be equal, and so must their paths, shapes and types.
    """
    state = jax.device_put(reference.first, may_alias=False)  # the planned function takes its buffers over
    found = _trail(step, state, reference.batches)
    worst: dict[str, Deviation] = {}
    for after, expected in zip(found, reference.trail, strict=True):
        assert {part: [*leaves] for part, leaves in after.items()} == {p: [*leaves] for p, leaves in expected.items()}
        for part, leaves in expected.items():
            own = deviation(after[part], leaves)
            worst[part] = max(worst.get(part, own), own)
    return worst


def deviation(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Deviation:
    """The largest difference between two sets of leaves by path; see `deviations`."""
    largest: dict[str, float] = collections.defaultdict(float)
    scales = {path: float(np.abs(leaf).max(initial=0)) for path, leaf in expected.items()}
    for path, scale in scales.items():
        largest[_kind(path)] = max(largest[_kind(path)], scale)
    worst = Deviation(0.0, "")
    for path, want in expected.items():
        got = found[path]
        assert (got.shape, got.dtype) == (want.shape, want.dtype), path
        if not np.issubdtype(want.dtype, np.floating):
            np.testing.assert_array_equal(got, want, err_msg=path)
            continue
        difference = float(np.abs(got - want).max(initial=0))
        scale = max(scales[path], 1e-3 * largest[_kind(path)], np.finfo(np.float32).tiny)
        assert np.isfinite(difference), f"{path}: {got}"
        worst = max(worst, Deviation(difference / scale, path))
    return worst


def _kind(path: str) -> str:
    """What a leaf is apart from which parameter it belongs to: the path up to the first name in a dictionary."""
    return path.split("['")[0]


def plan_of(fn: Callable[..., Any], args: tuple[Any, ...], mesh: dict[str, int], donate: int = 0) -> autoshard.Plan:
    """The plan of a function on eight slow devices; it knows every primitive and has nothing to warn of."""
    plan = autoshard.plan(
        fn,
        *args,
        cluster=slow_device_cluster(),
        mesh=mesh,
        donate_argnums=donate,
        options=OPTIONS,
    )
    check_plan(plan)
    return plan


def check_plan(plan: autoshard.Plan) -> None:
    """A plan has nothing to warn of, and splits the arguments over every axis."""
    assert plan.warnings == ()
    used = {axis for tensor in plan.arguments for entry in tensor.entries for axis in entry}
    assert used == set(plan.mesh_axes)


def assert_close(found: Any, expected: Any, rtol: float = 1e-3, atol: float = 2e-5) -> None:
    """Two trees of arrays agree within float32 tolerance, and exactly where they are not floats."""
    paths = jax.tree.leaves_with_path(expected)
    for (path, _), got, want in zip(paths, numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_equal(plan: autoshard.Plan, reference: Reference) -> None:
    """Planned steps are plain ones: metrics, parameters, optimizer and mutable state after each of `STEPS` steps."""
    assert_small(deviations(plan, reference))


def assert_small(found: dict[str, Deviation]) -> None:
    """No part deviates by more than `TOLERANCE`."""
    assert all(deviation.share <= TOLERANCE for deviation in found.values()), found


def assert_decodes(config: Any, params: Any, full_pass: Callable[[jax.Array], jax.Array], tokens: jax.Array) -> None:
    """A prompt at once, then token by token, gives the logits of the full pass over tokens (batch, sequence)."""
    functions, expected = build_inference(config), jax.jit(full_pass)(tokens)
    prompt = tokens.shape[1] // 2
    decode = jax.jit(functions.decode)
    logits, cache = jax.jit(functions.prefill)(params, tokens[:, :prompt], functions.empty_cache(tokens.shape[0]))
    np.testing.assert_allclose(logits, expected[:, prompt - 1], rtol=1e-4, atol=1e-5)
    for position in range(prompt, tokens.shape[1]):
        logits, cache = decode(params, tokens[:, position], cache)
        np.testing.assert_allclose(logits, expected[:, position], rtol=1e-4, atol=1e-5)
    assert int(cache.length) == tokens.shape[1]


def decoding_deviations(program: Program, mesh: dict[str, int]) -> dict[str, Deviation]:
    """How far planned prefill and decode steps, each by a plan of its own, are from unsharded ones, token by token.

    The parts are `metrics`, the logits, and `mutable`, the cache; the measure is that of `deviations`.
    """
    functions, params = build_inference(program.config), jax.jit(program.functions.init)(0).params
    tokens = program.batch()["inputs"]
    prompt, cache = tokens[:, :-STEPS], functions.empty_cache(tokens.shape[0])
    prefill = plan_of(functions.prefill, (params, prompt, cache), mesh, donate=2).jit(functions.prefill)
    decode = plan_of(functions.decode, (params, tokens[:, 0], cache), mesh, donate=2).jit(functions.decode)
    plain_decode = jax.jit(functions.decode)
    expected = jax.jit(functions.prefill)(params, prompt, cache)
    found = prefill(params, prompt, cache)
    worst = {}
    for position in range(-STEPS, 1):
        for part, got, want in zip(("metrics", "mutable"), found, expected, strict=True):
            leaves = lambda tree: {jax.tree_util.keystr(p): np.asarray(x) for p, x in jax.tree.leaves_with_path(tree)}
            own = deviation(leaves(got), leaves(want))
            worst[part] = max(worst.get(part, own), own)
        if position < 0:
            expected = plain_decode(params, tokens[:, position], expected[1])
            found = decode(params, tokens[:, position], found[1])
    return worst
