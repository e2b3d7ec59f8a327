"""benchmarks/exposed.py: the strategies written by hand compute the plain step, and only what fits is a rival."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "benchmarks"))

import exposed
from by_hand import gpt, strategies
from by_hand.placement import LEAST_ELEMENTS, largest_dimension, split_dimension

SIZES = gpt.Sizes(num_layers=1, width=256, inner_width=1024, num_heads=8, vocabulary=512, batch=8, length=32)


def test_fsdp_splits_the_largest_dimension_that_divides_and_leaves_small_ones_whole():
    assert largest_dimension((4096, 3, 32, 128), 16) == 0
    assert largest_dimension((100, 30000), 16) == 1
    assert largest_dimension((1000, 30001), 16) is None
    assert largest_dimension((4096, 16384), 16, taken=1) == 0
    assert largest_dimension((LEAST_ELEMENTS - 16,), 16) is None
    assert largest_dimension((LEAST_ELEMENTS,), 16) == 0


@pytest.mark.parametrize(
    "path, shape, dimension",
    [
        (".params['layers'][0]['qkv']", (4096, 3, 32, 128), 2),
        (".params['blocks'][0]['attention']['query']['kernel']", (4096, 8, 4, 128), 1),
        (".opt_state[0].mu['blocks'][0]['mlp']['down']['kernel']", (14336, 4096), 0),
        (".params['head']['kernel']", (4096, 128256), 1),
        (".params['blocks'][0]['attention_norm']['scale']", (4096,), None),
        (".opt_state[0].v_row['blocks'][0]['mlp']['up']['kernel']", (14336,), None),
        (".params['blocks'][0]['attention']['key']['kernel']", (4096, 6, 128), None),
    ],
)
def test_megatron_splits_by_the_name_of_the_parameter(path, shape, dimension):
    assert split_dimension(path, shape, 8) == dimension
    assert split_dimension(path, shape, 1) is None


@pytest.fixture(scope="module")
def plain():
    """The state and tokens of a small GPT, and what a plain step makes of them."""
    shapes, tokens = gpt.arguments(SIZES)
    leaves, tree = jax.tree.flatten(shapes["params"])
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = tree.unflatten(
        [jax.random.normal(k, s.shape) * s.shape[0] ** -0.5 for k, s in zip(keys, leaves, strict=True)]
    )
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"params": params, "m": zeros, "v": zeros, "count": jnp.int32(0)}
    batch = jax.random.randint(jax.random.key(1), tokens.shape, 0, SIZES.vocabulary)
    # Copies: what a strategy donates must not be memory that the next one reads.
    return jax.tree.map(np.array, (state, batch, jax.jit(gpt.step)(state, batch)))


@pytest.mark.parametrize("strategy", strategies.OF_GPT, ids=lambda s: s.name)
def test_a_strategy_computes_the_plain_step(strategy, plain):
    state, batch, (expected, loss) = plain
    devices = jax.devices("cpu")[:8]
    placement = strategy.placement(devices)
    placed = jax.device_put(state, placement.of(state)), jax.device_put(batch, placement.batch(batch))
    found, found_loss = strategies.lowered_gpt(strategy, SIZES, devices).compile()(*placed)
    assert found_loss == pytest.approx(loss, rel=2e-3)
    # The gradients; products are in bfloat16.
    for ours, theirs in zip(jax.tree.leaves(found["m"]), jax.tree.leaves(expected["m"]), strict=True):
        assert np.abs(np.asarray(ours) - theirs).max() <= 0.05 * np.abs(theirs).max()


def test_a_plan_is_compared_with_the_fastest_hand_written_program_that_fits_its_budget():
    def cell(strategy, step_s, total_gb, budget_gb=0.0):
        sizes = {"total_bytes": total_gb * 1e9, "peak_bytes": 1e9}
        return exposed.Cell("gpt", 16, strategy, "options", budget_gb, budget_gb > 0, step_s=step_s, **sizes)

    cells = [cell("fast", 0.1, 9), cell("fits", 0.2, 8), cell("slow", 0.3, 7), cell("plan", 0.15, 8, 8.0)]
    cells += [cell("plan, as written", 0.12, 8.1, 8.0), cell("fsdp, all kept", 0.1, 8)]
    by_hand, plan = exposed.best_by_hand(cells, 8.0, as_written=True), exposed.best_plan(cells, 8.0)
    assert by_hand == cells[1] and plan == cells[3] and exposed.best_by_hand(cells, 8.0) == cells[5]
    assert exposed.best_by_hand(cells, 72.0) == cells[0] and exposed.best_by_hand(cells, 6.0) is None
    text = exposed.table(cells)
    assert "geometric mean 0.750, most 0.750, of 1" in text and "geometric mean 1.500, most 1.500, of 1" in text
    ratios = "fits; options; 200.00 | 0.750 | fsdp, all kept; options; 100.00 | 1.500 |"
    assert f"| gpt | 16 | 8 | plan; as written; options;  | 150.00 | 0.00 | {ratios}" in text
