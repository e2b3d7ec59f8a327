"""Handwritten digits, enlarged to what a model reads: the 1,797 images of 8 x 8 pixels that scikit-learn brings along.

They are test images of Alpaydin and Kaynak 1998 (UCI machine learning repository, doi:10.24432/C50P49).
"""

import dataclasses

import grain
import numpy as np

from autoshard.errors import ConfigError
from autoshard.train.data.batches import Batch, Batches, Part, part_seed

SIZE = 8
"""Height and width of a digit, in pixels."""

NUM_CLASSES = 10
"""Digits from 0 to 9."""

LARGEST = 16
"""Brightness of a white pixel."""


@dataclasses.dataclass(frozen=True, slots=True)
class Digits:
    """Images float32 (count, 8, 8), from 0 to 16, and what they show, int32 (count,)."""

    images: np.ndarray
    labels: np.ndarray


def digits() -> Digits:
    """All digits, in an order that mixes their writers.

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "data.name: `digits` are read from scikit-learn, which is not installed. "
            "Install it: pip install scikit-learn, or pip install 'autoshard[images]'."
        ) from error
    flat, labels = map(np.asarray, load_digits(return_X_y=True))
    order = np.random.default_rng(0).permutation(len(labels))
    return Digits(flat[order].reshape(-1, SIZE, SIZE).astype(np.float32), labels[order].astype(np.int32))


def image_batches(
    data: Digits,
    part: Part,
    *,
    batch_size: int,
    seed: int,
    eval_fraction: float,
    image_size: int,
    num_channels: int,
    is_labelled: bool,
) -> Batches:
    """Batches of digits: shuffled anew each time that all were seen, or, for evaluation, one after another.

    Args:
        data: what there is.
        part: for training, or for evaluation; the first images are held out, whatever the seed.
        batch_size: images of a batch.
        seed: fixes the order.
        eval_fraction: share of the images that is held out.
        image_size: height and width of the images to make, in pixels, at least 8.
        num_channels: colours, all alike.
        is_labelled: whether a batch tells what the images show.

    Returns:
        Batches without end: `images`, float32 (batch_size, image_size, image_size, num_channels) from -1 to 1, and
        `labels`, int32 (batch_size,).
    """
    num_held_out = min(max(round(len(data.labels) * eval_fraction), 1), len(data.labels) - 1)
    if part == "eval":
        order = grain.MapDataset.range(num_held_out)
    else:
        order = grain.MapDataset.range(num_held_out, len(data.labels)).seed(part_seed(seed, part)).shuffle()

    def look_up(numbers: np.ndarray) -> Batch:
        batch = {"images": enlarged(data.images[numbers], image_size, num_channels)}
        return batch | {"labels": data.labels[numbers]} if is_labelled else batch

    # What is put in order are numbers; images are read, and enlarged, only for the examples asked for.
    numbers = order.repeat().batch(batch_size, drop_remainder=True)
    of = lambda examples: numbers.map(lambda numbers: look_up(numbers[examples]))
    return Batches(batch_size, of)


def enlarged(images: np.ndarray, size: int, num_channels: int) -> np.ndarray:
    """Digits as larger images: pixels repeated as often as fits, black around them, in the middle.

    Args:
        images: float32 (batch, 8, 8), from 0 to 16.
        size: height and width to make, in pixels, at least 8.
        num_channels: colours, all alike.

    Returns:
        float32 (batch, size, size, num_channels), from -1 to 1.
    """
    factor = size // SIZE
    large = images.repeat(factor, axis=1).repeat(factor, axis=2) / (LARGEST / 2) - 1
    before = (size - factor * SIZE) // 2
    after = size - factor * SIZE - before
    large = np.pad(large, ((0, 0), (before, after), (before, after)), constant_values=-1)
    return large[..., None].repeat(num_channels, axis=-1)
