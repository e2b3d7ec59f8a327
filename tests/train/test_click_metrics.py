"""Figures of click models against values derived by hand, all pairs, and what one model gives all its examples."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.train.click_metrics import click_metrics
from autoshard.train.config import TrainConfig
from autoshard.train.evaluation import evaluator
from autoshard.train.planning import make_plan
from autoshard.train.registry import load_data, train_functions
from autoshard.train.run import planned_run


def test_figures_by_hand():
    """Of 2 x 2 pairs two are in order, one is tied and one is not: 2.5 / 4. Probabilities 1/2 and 3/4, 1/4."""
    log3 = math.log(3)
    found = click_metrics(np.array([0.0, log3, 0.0, -log3]), np.array([1, 0, 0, 1]))
    loss = (math.log(2) + math.log(4) + math.log(2) + math.log(4)) / 4
    assert (found.num_examples, found.click_share) == (4, 0.5)
    assert found.log_loss == pytest.approx(loss) and found.auc == 0.5 / 4
    assert found.normalized_entropy == pytest.approx(loss / math.log(2))


def test_all_ties_tell_nothing_and_the_share_alone_has_entropy_one():
    clicks = np.array([1, 0, 0, 0])
    found = click_metrics(np.full(4, math.log(1 / 3)), clicks)
    assert found.auc == 0.5 and found.normalized_entropy == pytest.approx(1)


@given(st.lists(st.tuples(st.integers(-3, 3), st.booleans()), min_size=1, max_size=30))
@settings(max_examples=200, deadline=None)
def test_the_area_is_the_share_of_pairs_in_order(rows):
    logits, clicks = (np.array(column) for column in zip(*rows, strict=True))
    pairs = [(a > b) + (a == b) / 2 for a, is_click in rows if is_click for b, other in rows if not other]
    found = click_metrics(logits, clicks)
    assert found.auc == pytest.approx(np.mean(pairs)) if pairs else math.isnan(found.auc)
    assert math.isnan(found.normalized_entropy) == (not pairs)


def test_extreme_scores_have_finite_losses_and_nan_is_not_hidden():
    assert click_metrics(np.array([1e5, -1e5]), np.array([0, 1])).log_loss == 1e5
    assert math.isnan(click_metrics(np.array([math.nan, 0.0]), np.array([0, 1])).auc)
    with pytest.raises(ValueError, match="one length"):
        click_metrics(np.zeros(2), np.zeros(3))


def test_an_evaluation_has_the_figures_over_all_its_batches(tmp_path):
    config = TrainConfig.model_validate(
        {
            "model": {"name": "dlrm", "overrides": {"table_rows": [16, 8], "bottom_dims": [4], "embed_dim": 4}},
            "data": {"batch_size": 64},
            "plan": {"mesh": {"data": 4, "tensor": 2}, "time_limit_s": 5},
            "train": {"output_dir": str(tmp_path)},
        }
    )
    functions, data = train_functions(config), load_data(config)
    run = planned_run(config, functions, data, make_plan(config, functions), tmp_path)
    report = evaluator(run, num_batches=3, items=64)(0, run.initial_state())
    alone = [jax.jit(functions.evaluate)(functions.init(config.train.seed), data.eval_batches[n]) for n in range(3)]
    expected = click_metrics(*(np.concatenate([one[name] for one in alone]) for name in ("logits", "clicks")))
    assert report.metrics["loss"] == pytest.approx(expected.log_loss, rel=1e-5)
    assert report.metrics["auc"] == pytest.approx(expected.auc, abs=1e-4)
    assert report.metrics["normalized_entropy"] == pytest.approx(expected.normalized_entropy, rel=1e-5)
    assert set(report.metrics) == {"loss", "auc", "normalized_entropy"}
    assert report.record()["items_per_s"] == report.items / report.eval_time_s
