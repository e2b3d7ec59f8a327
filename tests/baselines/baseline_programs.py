"""The programs that the baselines are tested on: a two-layer perceptron with momentum, and small GPTs."""

import pathlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from autoshard_models import presets, train_step
from autoshard_models.gpt_linen import LinenGPTConfig

CLUSTERS = pathlib.Path(__file__).parents[2] / "configs" / "clusters"
H100X8 = CLUSTERS / "h100x8.yaml"
CPUX8 = CLUSTERS / "cpux8.yaml"

BATCH, WIDTH, HIDDEN = 32, 16, 64
PARAMETER_BYTES = {"in": WIDTH * HIDDEN * 4, "in_bias": HIDDEN * 4, "out": HIDDEN * WIDTH * 4, "out_bias": WIDTH * 4}
SEQUENCE, EMBED, LAYERS = 16, 32, 2


class Step(NamedTuple):
    """A training step: its function, a function that makes the state, and one that makes a batch of concrete arrays."""

    fn: object
    init: object
    batch: object

    def shapes(self):
        return jax.eval_shape(self.init, 0), jax.eval_shape(self.batch)


def mlp() -> Step:
    """Two layers with biases, a mean square error, and SGD with momentum."""

    def init(seed):
        one, two = jax.random.split(jax.random.key(seed))
        params = {
            "in": jax.random.normal(one, (WIDTH, HIDDEN)) / WIDTH**0.5,
            "in_bias": jnp.zeros(HIDDEN),
            "out": jax.random.normal(two, (HIDDEN, WIDTH)) / HIDDEN**0.5,
            "out_bias": jnp.zeros(WIDTH),
        }
        return {"params": params, "momentum": jax.tree.map(jnp.zeros_like, params), "step": jnp.zeros((), jnp.int32)}

    def step(state, batch):
        def loss_of(p):
            hidden = jnp.tanh(batch["x"] @ p["in"] + p["in_bias"])
            return jnp.mean((hidden @ p["out"] + p["out_bias"] - batch["y"]) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state["params"])
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
        params = jax.tree.map(lambda p, m: p - 0.1 * m, state["params"], momentum)
        return {"params": params, "momentum": momentum, "step": state["step"] + 1}, loss

    def batch():
        x, y = jax.random.normal(jax.random.key(7), (2, BATCH, WIDTH))
        return {"x": x, "y": y}

    return Step(step, init, batch)


def gpt(kind: str = "plain", layers: int = LAYERS, batch_size: int = 16) -> Step:
    """A small GPT: `plain` (untied embeddings), `tied`, `dropout` (rematerialised), `scan` (Linen, one loop)."""
    config = presets.preset("tiny", num_layers=layers, embed_dim=EMBED, num_heads=8, context_length=SEQUENCE,
                            tie_embeddings=kind != "plain", dropout_rate=0.1 * (kind == "dropout"),
                            remat=kind == "dropout")  # fmt: skip
    if kind == "scan":
        fields = {f: getattr(config, f) for f in config.__dataclass_fields__}
        config = LinenGPTConfig(**fields, scan_layers=True)
    functions = train_step.build(config, train_step.adamw())

    def batch():
        tokens = jax.random.randint(jax.random.key(7), (2, batch_size, SEQUENCE), 0, config.vocab_size)
        return {"inputs": tokens[0], "targets": tokens[1]}

    return Step(functions.step, functions.init, batch)
