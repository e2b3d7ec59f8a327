"""What every family must satisfy: it learns, its state keeps its types, and planned steps equal unsharded ones."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from autoshard_models.inference import build_inference
from autoshard_models.train_step import TrainFunctions
from flax import nnx

import autoshard
from autoshard.cluster import Cluster, DeviceType, Link, NodeGroup

MESHES = {"1-D": {"data": 8}, "2-D": {"data": 2, "tensor": 4}}


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
    """The loss on one batch falls to `share` of the first one, and the state keeps its structure and types.

    Compiles what `assert_planned_steps_equal_unsharded_ones` compiles, if functions and shapes of batches are equal.
    """
    step, state = jax.jit(functions.step), jax.jit(functions.init)(0)
    before = jax.tree.map(lambda x: (x.shape, x.dtype), state)
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < share * losses[0], losses
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    assert int(state.step) == steps


def plan_of(fn: Callable[..., Any], args: tuple[Any, ...], mesh: dict[str, int], donate: int = 0) -> autoshard.Plan:
    """The plan of a function on eight slow devices; it knows every primitive and has nothing to warn of."""
    plan = autoshard.plan(
        fn,
        *args,
        cluster=slow_device_cluster(),
        mesh=mesh,
        donate_argnums=donate,
        options=autoshard.PlanOptions(relative_gap=0.05, time_limit_s=30),  # good enough to be interesting
    )
    assert plan.warnings == ()
    used = {axis for tensor in plan.arguments for entry in tensor.entries for axis in entry}
    assert used == set(mesh)  # the plan does split the arguments over every axis
    return plan


def assert_close(found: Any, expected: Any, rtol: float = 1e-3, atol: float = 2e-5) -> None:
    """Two trees of arrays agree within float32 tolerance, and exactly where they are not floats."""
    paths = jax.tree.leaves_with_path(expected)
    for (path, _), got, want in zip(paths, numbers(found), numbers(expected), strict=True):
        np.testing.assert_allclose(got, want, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))


def assert_planned_steps_equal_unsharded_ones(
    functions: TrainFunctions, batches: list[Any], rtol: float = 1e-3, atol: float = 5e-5
) -> dict[str, autoshard.Plan]:
    """State and metrics of planned steps, one for each batch, are those of plain `jax.jit`; on each of `MESHES`."""
    trail, first, step = [], jax.jit(functions.init)(0), jax.jit(functions.step)
    state = first
    for batch in batches:
        state, metrics = step(state, batch)
        trail.append((state, metrics))
    plans = {}
    for name, mesh in MESHES.items():
        plan = plans[name] = plan_of(functions.step, (first, batches[0]), mesh)
        state, step = jax.tree.map(jnp.copy, first), plan.jit(functions.step)
        for batch, (expected, expected_metrics) in zip(batches, trail, strict=True):
            state, metrics = step(state, batch)
            assert_close(metrics, expected_metrics, rtol=5e-5, atol=1e-6)
            assert_close(state, expected, rtol, atol)
    return plans


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


def assert_planned_decoding_equals_unsharded_decoding(
    config: Any, params: Any, tokens: jax.Array, mesh: dict[str, int]
) -> None:
    """Prefill and decode steps as planned, each by a plan of its own, give what they give unsharded."""
    functions = build_inference(config)
    prompt, cache = tokens[:, :-2], functions.empty_cache(tokens.shape[0])
    prefill = plan_of(functions.prefill, (params, prompt, cache), mesh, donate=2).jit(functions.prefill)
    decode = plan_of(functions.decode, (params, tokens[:, 0], cache), mesh, donate=2).jit(functions.decode)
    plain_prefill, plain_decode = jax.jit(functions.prefill), jax.jit(functions.decode)
    expected = plain_prefill(params, prompt, cache)
    found = prefill(params, prompt, cache)
    assert_close(found, expected)
    for position in (-2, -1):
        expected = plain_decode(params, tokens[:, position], expected[1])
        found = decode(params, tokens[:, position], found[1])
        assert_close(found, expected)
