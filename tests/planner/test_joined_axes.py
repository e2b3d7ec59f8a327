"""Two axes of a mesh joined into one: the smaller problem's solutions are solutions of the whole."""

import random

import jax
import jax.numpy as jnp
import pytest

from autoshard.planner.joined_axes import choices_apart, joined_meshes
from autoshard.solver import evaluate


def step(state, x):
    """A gradient step of two products with a normalisation between them, over positions that are split in two."""

    def loss(params):
        h = jax.nn.softmax(jnp.tanh(x @ params["up"]).reshape(8, 4, 8, 8), axis=-1)
        return ((h.reshape(32, 64) @ params["down"]) ** 2).sum()

    return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))


@pytest.fixture(scope="module")
def problems(formulated, mesh_of):
    """The problem on (2, 2, 2), and those on (4, 2) and (2, 4): (first of the joined axes, problem)."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args, mesh = ({"up": f32(16, 64), "down": f32(64, 8)}, f32(32, 16)), mesh_of(2, 2, 2)
    on = lambda m: formulated(step, args, m, donate=(0,))
    return on(mesh), [(first, on(joined)) for first, joined in joined_meshes(mesh)]


def test_joined_axes_go_on_where_the_inner_one_stops(mesh_of):
    """Axes a and b lie on the slow links, c on the fast one."""
    (_, outer), (_, inner) = joined_meshes(mesh_of(2, 2, 2))
    assert (outer.axis_names, outer.shape) == (("a+b", "c"), (4, 2))
    assert [level.size for level in outer.axes[0].levels] == [4]
    assert (inner.axis_names, inner.shape) == (("a", "b+c"), (2, 4))
    assert [(level.size, level.link.level) for level in inner.axes[1].levels] == [(2, 0), (2, 1)]
    assert not list(joined_meshes(mesh_of(2, 4))) and not list(joined_meshes(mesh_of(2, 1, 4)))


def test_what_joined_axes_can_do_costs_no_more_apart(problems):
    whole, parts = problems
    rng = random.Random(0)
    for first, joined in parts:
        for _ in range(100):
            choices = [rng.randrange(len(node.costs)) for node in joined.problem.nodes]
            apart, together = (
                evaluate(whole.problem, choices_apart(whole, joined, first, choices)),
                evaluate(joined.problem, choices),
            )
            assert apart.objective <= together.objective * (1 + 1e-12)
            assert apart.peak_usage == pytest.approx(together.peak_usage)


def test_what_is_not_allowed_apart_is_none(problems, formulated, mesh_of):
    whole, ((first, joined), _) = problems
    pinned = [(("c",), ()), None, None]
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = {"down": f32(64, 8), "up": f32(16, 64)}, f32(32, 16)
    narrow = formulated(step, args, mesh_of(2, 2, 2), donate=(0,), pins=pinned)
    choices = [0] * len(joined.problem.nodes)
    assert choices_apart(whole, joined, first, choices) is not None
    assert choices_apart(narrow, joined, first, choices) is None  # the first layout of every argument is whole
