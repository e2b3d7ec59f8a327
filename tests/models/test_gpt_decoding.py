"""The GPT decodes with a cache as it does in one pass."""

import jax
import zoo_checks
from autoshard_models.gpt import GPT, GPTConfig
from autoshard_models.train_step import adamw, build
from flax import nnx

SMALL = GPTConfig(vocab_size=32, context_length=16, num_layers=2, num_heads=4, embed_dim=32)


def test_decoding_equals_the_full_pass_token_by_token():
    params = jax.jit(build(SMALL, adamw()).init)(0).params
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: GPT(SMALL, rngs=nnx.Rngs(0))))
    full_pass = lambda tokens: nnx.merge(graphdef, params)(tokens)
    zoo_checks.assert_decodes(SMALL, params, full_pass, zoo_checks.tokens_of(32, 2, 10)["inputs"])
