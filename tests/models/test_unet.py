"""The diffusion U-Net: sizes, the schedule."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import unet
from autoshard_models.train_step import adamw, build

SMALL = dataclasses.replace(unet.PRESETS["tiny"], base_channels=8, num_groups=4)


def batch_of(seed: int = 0) -> dict[str, jax.Array]:
    shape = unet.batch_shapes(SMALL, 8)["images"].shape
    return {"images": jnp.asarray(np.random.default_rng(seed).uniform(-1, 1, shape), jnp.float32)}


@pytest.mark.parametrize(("name", "published"), [("64", 296e6), ("256", 554e6)])
def test_presets_are_about_as_large_as_what_they_follow(name, published):
    """Our images are halved and doubled by plain convolutions, theirs by residual blocks."""
    assert zoo_checks.num_params(build(unet.PRESETS[name], adamw())) == pytest.approx(published, rel=0.12)


def test_sizes_that_cannot_be_halved_are_refused():
    with pytest.raises(ValueError, match="image_size=9"):
        dataclasses.replace(SMALL, image_size=9)


def test_noise_grows_from_almost_none_to_almost_all():
    share = unet.signal_share(jnp.arange(1000), 1000)
    assert share[0] > 0.999 and share[-1] < 1e-4 and (jnp.diff(share) < 0).all()


def test_doubling_repeats_each_pixel():
    x = jnp.arange(12.0).reshape(1, 2, 3, 2)
    np.testing.assert_array_equal(unet.doubled(x), x.repeat(2, axis=1).repeat(2, axis=2))


def test_first_loss_is_the_variance_of_the_noise():
    objective = unet.objective(SMALL)
    params, mutable = jax.jit(objective.init)(jax.random.key(0))
    loss, _ = jax.jit(objective.loss)(params, mutable, batch_of(), jax.random.key(1))
    assert float(loss) == pytest.approx(1.0, abs=0.2)
