"""The model of the benchmarks that run on quotas of a core: a residual MLP whose layers all cost the same."""


def training(num_layers, num_examples, num_tokens, width):
    """(step, state, batch) of a residual MLP; an example is `num_tokens` rows of `width` values."""
    import jax
    import numpy as np
    import optax

    from autoshard.train_step import TrainStep

    def loss_fn(params, batch, rng):
        x = batch["x"]
        for n in range(num_layers):
            layer = params[f"layer{n:02}"]
            x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
        return ((x - batch["y"]) ** 2).mean(), {}

    step = TrainStep(loss_fn, optax.sgd(1e-3))
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    params = {
        f"layer{n:02}": {"up": draw(width, 4 * width) / 16, "down": draw(4 * width, width) / 320}
        for n in range(num_layers)
    }
    shape = num_examples, num_tokens, width
    return step, step.init(params), {"x": draw(*shape), "y": draw(*shape)}
