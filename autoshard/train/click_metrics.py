"""How well clicks are predicted: log loss, area under the ROC curve, normalised entropy."""

import dataclasses
import math

import numpy as np
from scipy.special import entr


@dataclasses.dataclass(frozen=True, slots=True)
class ClickMetrics:
    """Figures of some predictions.

    Attributes:
        num_examples: how many.
        click_share: clicks among them.
        log_loss: mean of -log of the probability given to what happened, in nats.
        auc: probability that a click has a higher score than what was not clicked, ties counting half; NaN where all
            examples are alike.
        normalized_entropy: `log_loss` by the entropy of `click_share`: below 1 where the scores tell more than the
            share alone (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at Facebook", section 2); NaN
            where all examples are alike.
    """

    num_examples: int
    click_share: float
    log_loss: float
    auc: float
    normalized_entropy: float


def click_metrics(logits: np.ndarray, clicks: np.ndarray) -> ClickMetrics:
    """The figures of predictions, exact over all that are given.

    The area is that of the Mann-Whitney statistic: with r the sum of the ranks of the n clicks among all, m others, and
    equal scores sharing their mean rank, it is (r - n (n + 1) / 2) / (n m).

    Args:
        logits: float (examples,), the logarithms of the odds of a click.
        clicks: (examples,), 0 or 1.

    Raises:
        ValueError: no examples, or not as many logits as clicks.
    """
    logits, is_click = np.asarray(logits, np.float64), np.asarray(clicks) > 0.5
    if logits.shape != is_click.shape or logits.ndim != 1 or not logits.size:
        raise ValueError(f"logits and clicks must be of one length above 0; received {logits.shape}, {is_click.shape}.")
    num_clicks = int(is_click.sum())
    num_others = logits.size - num_clicks
    share = num_clicks / logits.size
    with np.errstate(invalid="ignore"):  # a NaN among the logits is one in the figures
        log_loss = float(np.mean(np.logaddexp(0, logits) - is_click * logits))
    if not num_clicks or not num_others:
        return ClickMetrics(logits.size, share, log_loss, math.nan, math.nan)
    if np.isnan(logits).any():
        auc = math.nan
    else:
        from scipy.stats import rankdata  # takes half a second to import, which every trainer would wait for

        ranks = rankdata(logits)[is_click].sum()
        auc = float((ranks - num_clicks * (num_clicks + 1) / 2) / (num_clicks * num_others))
    return ClickMetrics(logits.size, share, log_loss, auc, log_loss / float(entr(share) + entr(1 - share)))
