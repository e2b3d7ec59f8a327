"""Vision transformers: sizes against print, Linen against NNX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zoo_checks
from autoshard_models import vit
from autoshard_models.train_step import adamw, build
from autoshard_models.vit_linen import LinenViTConfig

SMALL = dataclasses.replace(vit.PRESETS["tiny"], num_layers=1, embed_dim=32, hidden_dim=64)
FUNCTIONS = {
    "nnx": build(SMALL, adamw(1e-3)),
    "linen": build(LinenViTConfig(**dataclasses.asdict(SMALL)), adamw(1e-3)),
}


@pytest.mark.parametrize(("name", "published"), [("b16", 86e6), ("l16", 307e6), ("h14", 632e6)])
def test_presets_have_their_published_size(name, published):
    assert zoo_checks.num_params(build(vit.PRESETS[name], adamw())) == pytest.approx(published, rel=0.01)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="patch_size=3"):
        dataclasses.replace(SMALL, patch_size=3)
    with pytest.raises(ValueError, match="num_heads=5"):
        dataclasses.replace(SMALL, num_heads=5)


def linen_params_of(params):
    """The NNX model's parameters in the tree of the Linen model."""
    rest = {name: value for name, value in params.items() if name != "blocks"}
    flat = lambda block: {
        f"{outer}_{inner}" if outer in ("attention", "mlp") else outer: layer
        for outer, layers in block.items()
        for inner, layer in (layers.items() if outer in ("attention", "mlp") else [("", layers)])
    }
    return rest | {f"block_{layer}": flat(block) for layer, block in params["blocks"].items()}


def test_linen_steps_as_nnx_does():
    nnx_functions, linen_functions = FUNCTIONS["nnx"], FUNCTIONS["linen"]
    batch, state = zoo_checks.images_of(SMALL), jax.jit(nnx_functions.init)(0)
    linen_state = jax.jit(linen_functions.init)(0).replace(params=linen_params_of(state.params))
    state, metrics = jax.jit(nnx_functions.step)(state, batch)
    linen_state, linen_metrics = jax.jit(linen_functions.step)(linen_state, batch)
    zoo_checks.assert_close(metrics, linen_metrics)
    zoo_checks.assert_close(linen_params_of(state.params), linen_state.params)


def test_patches_are_cut_from_the_image():
    """With an identity as the kernel, embedding a patch lists its pixels, row by row."""
    config = dataclasses.replace(SMALL, embed_dim=4, num_heads=1)
    images = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, 8, 1)), jnp.float32)
    kernel = jnp.eye(4).reshape(2, 2, 1, 4)
    model = vit.ViT(config, rngs=zoo_checks.rngs())
    model.patch_embed.kernel[...] = kernel
    expected = images.reshape(2, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(2, 4, 4, 4)
    np.testing.assert_allclose(model.patch_embed(images), expected, rtol=1e-6)
