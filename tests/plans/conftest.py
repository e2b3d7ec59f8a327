"""A small training step, its arguments, and its plan on eight CPU devices."""

import dataclasses
import pathlib
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cluster import Cluster

CLUSTER = Cluster.from_file(pathlib.Path(__file__).parents[2] / "configs" / "clusters" / "cpux8.yaml")


def _train(state, batch):
    """One step of gradient descent of a network of two layers."""

    def loss(params):
        h = jax.nn.relu(batch["x"] @ params["up"]["kernel"] + params["up"]["bias"])
        return ((h @ params["down"]["kernel"] - batch["y"]) ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], gradients)
    return {"params": params, "step": state["step"] + 1}, value


def _shapes(width: int = 64):
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    params = {"up": {"kernel": f32(32, width), "bias": f32(width)}, "down": {"kernel": f32(width, 16)}}
    state = {"params": params, "step": jax.ShapeDtypeStruct((), jnp.int32)}
    return state, {"x": f32(256, 32), "y": f32(256, 16)}


@pytest.fixture(scope="session")
def train() -> Callable:
    """(state, batch) -> (state, loss)"""
    return _train


@pytest.fixture(scope="session")
def shapes() -> Callable:
    """(width=64) -> the abstract arguments of `train`"""
    return _shapes


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """Eight CPU devices."""
    return CLUSTER


@pytest.fixture(scope="session")
def plan() -> autoshard.Plan:
    """The plan of `train`, with the logical mesh searched too."""
    return autoshard.plan(_train, *_shapes(), cluster=CLUSTER, donate_argnums=0)


def _many_layers(params, x):
    """As many layers as there are weights, and their update."""

    def loss(p):
        y = x
        for w in p:
            y = jnp.tanh(y @ w)
        return jnp.sum(y * y)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


@pytest.fixture(scope="session")
def many_layers():
    """A step that trains layers: (weights, rows) -> weights."""
    return _many_layers


@pytest.fixture(scope="module")
def gpus(mesh_of):
    """A mesh whose compiler has both schedules: a product's workspace is what tells a GPU."""

    def mesh(*sizes):
        made = mesh_of(*sizes)
        return dataclasses.replace(
            made, device_type=dataclasses.replace(made.device_type, product_workspace_bytes=1024)
        )

    return mesh
