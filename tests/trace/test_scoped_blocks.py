"""Blocks put from outside around what stands in name scopes."""

import pathlib

import jax
import jax.numpy as jnp
import pytest

from autoshard.annotations.block import Block, BlockKind
from autoshard.errors import AnnotationError, ConfigError
from autoshard.trace.scoped_blocks import with_blocks
from autoshard.trace.trace import trace
from autoshard.train.config import load_config

X = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
WHOLE = Block(BlockKind.REPLICATE, "whole", degree=4)
PART = Block(BlockKind.SPLIT, "part", (1,), degree=2)
CONFIGS = sorted((pathlib.Path(__file__).parents[2] / "configs" / "annotated").glob("*.yaml"))


def loss(w, x):
    def body(x, _):
        with jax.named_scope("experts"):
            x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
        return x @ w, None

    return jnp.sum(jax.lax.scan(body, x, None, length=2)[0])


def products(fn):
    operations = trace(lambda w, x: w - jax.grad(fn)(w, x), (X, X)).graph.operations
    return [tuple(map(str, o.blocks)) for o in operations if o.name == "dot_general"]


def test_a_pattern_marks_what_is_in_its_scopes_in_both_passes():
    found = products(with_blocks(loss, [(None, WHOLE), ("exp*", PART)]))
    assert set(found) == {("replicate(4)",), ("replicate(4)", "split(2)")}
    assert found.count(("replicate(4)",)) == 3  # the product that is in no such scope, and its two gradients
    assert set(products(with_blocks(loss, [(None, WHOLE)]))) == {("replicate(4)",)}


def test_the_function_stays_the_same():
    marked = with_blocks(loss, [(None, WHOLE), ("experts", PART)])
    for ours, theirs in zip(jax.value_and_grad(marked)(X, X), jax.value_and_grad(loss)(X, X), strict=True):
        assert jnp.allclose(ours, theirs)


def test_a_pattern_that_fits_nothing_is_refused():
    with pytest.raises(AnnotationError, match=r"no scope fits 'head'.*experts"):
        jax.make_jaxpr(with_blocks(loss, [("head", PART)]))(X, X)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_annotated_configurations_load(path):
    config = load_config(path)
    assert config.plan.annotations or config.plan.stages is not None
    assert config.plan.cluster is not None and pathlib.Path(config.plan.cluster).is_file()
    assert config.train.output_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("entry", ["{}", "{replicate: 2, split: 2}", "{replicate: 2, colocate: true}"])
def test_an_entry_asks_for_one_thing(entry):
    with pytest.raises(ConfigError, match="plan.annotations.0.*`replicate`, or `split`"):
        load_config(CONFIGS[0], [f"plan.annotations=[{entry}]"])
