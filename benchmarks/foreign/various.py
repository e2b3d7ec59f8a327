"""Other programs in plain JAX: dense regression, recurrences, look-ups, graphs, fields, actors."""

import jax
import jax.numpy as jnp
import optax

from foreign.common import Subject, adam_state, adam_step, arrays, ints, optax_state, optax_step, sgd_step

BF16 = jnp.bfloat16


def regression() -> Subject:
    """Dense layers with a list of (weight, bias); gradient descent by hand, all in float32."""
    widths = (2048, 8192, 8192, 8192, 1024)

    def loss(params, batch):
        inputs, targets = batch
        for weight, bias in params[:-1]:
            inputs = jnp.tanh(jnp.dot(inputs, weight) + bias)
        weight, bias = params[-1]
        return jnp.mean((jnp.dot(inputs, weight) + bias - targets) ** 2)

    params = [(arrays((a, b)), arrays((b,))) for a, b in zip(widths, widths[1:], strict=False)]
    return Subject(sgd_step(loss), params, (arrays((8192, widths[0])), arrays((8192, widths[-1]))))


def lstm(num_layers: int = 2) -> Subject:
    """A recurrent language model: one gate weight a layer, `lax.scan` over time; clipped SGD of optax."""
    d, vocabulary, length = 2048, 10000, 64

    def layer(p, xs):  # xs: [time, batch, d]
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["input"] + h @ p["hidden"] + p["bias"], 4, axis=-1)
            c = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], d))
        return jax.lax.scan(cell, (zeros, zeros), xs)[1]

    def loss(params, tokens):
        xs = params["embedding"][tokens[:, :-1]].swapaxes(0, 1)
        for p in params["layers"]:
            xs = layer(p, xs)
        logits = xs @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:].T).mean()

    gates = {"input": (d, 4 * d), "hidden": (d, 4 * d), "bias": (4 * d,)}
    params = arrays({"embedding": (vocabulary, d), "layers": [gates] * num_layers, "out": (d, vocabulary)})
    optimizer = optax.chain(optax.clip(0.25), optax.sgd(1.0))
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), ints(512, length + 1))


def state_space(num_layers: int = 2) -> Subject:
    """Diagonal linear recurrences by `associative_scan`; Adam by hand."""
    d, inner, vocabulary, length = 1024, 2048, 32000, 1024

    def mixed(p, x):
        u = x @ p["in"].astype(BF16)
        gate, u = jnp.split(u, 2, axis=-1)
        decay = jnp.exp(-jax.nn.softplus(u.astype(jnp.float32) * p["rate"] + p["shift"]))
        inputs = (1 - decay) * u.astype(jnp.float32)
        combine = lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1])
        states = jax.lax.associative_scan(combine, (decay, inputs), axis=1)[1].astype(BF16)
        return (states * jax.nn.silu(gate)) @ p["out"].astype(BF16)

    def loss(params, tokens):
        x = jnp.take(params["embedding"], tokens, axis=0).astype(BF16)
        for p in params["layers"]:
            scale = jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True) + 1e-6)
            x = x + mixed(p, (x * scale).astype(BF16))
        logits = (x @ params["embedding"].astype(BF16).T).astype(jnp.float32)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    layer = {"in": (d, 2 * inner), "out": (inner, d), "rate": (inner,), "shift": (inner,)}
    params = arrays({"embedding": (vocabulary, d), "layers": [layer] * num_layers})
    return Subject(adam_step(loss), adam_state(params), ints(32, length))


def factorisation() -> Subject:
    """Ratings as products of rows of two tables, with biases; gradient descent on the tables as they are."""
    users, items, rank = 2_000_000, 400_000, 128

    def loss(params, batch):
        u = jnp.take(params["users"], batch["user"], axis=0)
        i = jnp.take(params["items"], batch["item"], axis=0)
        biases = params["user_bias"][batch["user"]] + params["item_bias"][batch["item"]]
        errors = jnp.sum(u * i, axis=-1) + biases - batch["rating"]
        return jnp.mean(errors**2) + 1e-4 * (jnp.mean(u**2) + jnp.mean(i**2))

    params = arrays({"users": (users, rank), "items": (items, rank), "user_bias": (users,), "item_bias": (items,)})
    batch = {"user": ints(65536), "item": ints(65536), "rating": arrays((65536,))}
    return Subject(sgd_step(loss), params, batch)


def click_model() -> Subject:
    """Eight tables of looked-up features, their pairwise products and dense layers; Adagrad."""
    rows, width, batch_size = (4_000_000, 1_000_000, 400_000, 100_000, 40_000, 10_000, 1_000, 200), 64, 32768
    bottom, top = (13, 512, 256, width), (width + 36, 1024, 1024, 512, 1)

    def dense(layers, x):
        for n, (weight, bias) in enumerate(layers):
            x = x @ weight + bias
            x = jax.nn.relu(x) if n < len(layers) - 1 else x
        return x

    def loss(params, batch):
        dense_part = jax.nn.relu(dense(params["bottom"], batch["dense"]))
        looked_up = [jnp.take(t, batch["sparse"][:, n], axis=0) for n, t in enumerate(params["tables"])]
        together = jnp.stack([dense_part, *looked_up], axis=1)
        products = together @ together.transpose(0, 2, 1)
        first, second = jnp.triu_indices(len(rows) + 1, k=1)
        logits = dense(params["top"], jnp.concatenate([dense_part, products[:, first, second]], axis=1))[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"]).mean()

    stack = lambda widths: [(arrays((a, b)), arrays((b,))) for a, b in zip(widths, widths[1:], strict=False)]
    params = {"bottom": stack(bottom), "top": stack(top), "tables": [arrays((n, width)) for n in rows]}
    optimizer = optax.adagrad(0.01)
    batch = {"dense": arrays((batch_size, 13)), "sparse": ints(batch_size, len(rows)), "clicked": arrays((batch_size,))}
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), batch)


def skip_gram() -> Subject:
    """Word vectors with negative samples; Adam by hand on two tables."""
    vocabulary, d, negatives = 500_000, 512, 16

    def loss(params, batch):
        centre = params["inside"][batch["centre"]]
        right = jnp.sum(centre * params["outside"][batch["context"]], axis=-1)
        wrong = jnp.einsum("bd,bnd->bn", centre, params["outside"][batch["negative"]])
        return -jnp.mean(jax.nn.log_sigmoid(right) + jnp.sum(jax.nn.log_sigmoid(-wrong), axis=-1))

    params = arrays({"inside": (vocabulary, d), "outside": (vocabulary, d)})
    batch = {"centre": ints(16384), "context": ints(16384), "negative": ints(16384, negatives)}
    return Subject(adam_step(loss), adam_state(params), batch)


def graph_convolution() -> Subject:
    """Messages along edges by `take` and `segment_sum`, all nodes at once; Adam by hand."""
    nodes, edges, d, classes = 131_072, 1_048_576, 512, 64

    def loss(params, batch):
        x = batch["features"] @ params["embed"]
        degree = jax.ops.segment_sum(jnp.ones(edges), batch["receivers"], nodes)
        for p in params["layers"]:
            sent = jnp.take(x, batch["senders"], axis=0)
            received = jax.ops.segment_sum(sent, batch["receivers"], nodes) / jnp.maximum(degree, 1.0)[:, None]
            x = jax.nn.relu(x @ p["own"] + received @ p["others"] + p["bias"])
        logits = x @ params["head"]
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["label"][:, None], axis=1)
        return -jnp.mean(picked)

    layer = {"own": (d, d), "others": (d, d), "bias": (d,)}
    params = arrays({"embed": (256, d), "layers": [layer] * 2, "head": (d, classes)})
    batch = {"features": arrays((nodes, 256)), "senders": ints(edges), "receivers": ints(edges), "label": ints(nodes)}
    return Subject(adam_step(loss), adam_state(params), batch)


def radiance_field() -> Subject:
    """Colours along rays: sines of places, dense layers with a skip, products along each ray; Adam of optax."""
    rays, samples, d = 16384, 64, 512

    def encoded(x, count=10):
        scaled = x[..., None] * 2.0 ** jnp.arange(count)
        return jnp.concatenate([jnp.sin(scaled), jnp.cos(scaled)], -1).reshape(*x.shape[:-1], -1)

    def loss(params, batch):
        depths = jnp.linspace(2.0, 6.0, samples)
        places = batch["origin"][:, None] + batch["direction"][:, None] * depths[:, None]
        inputs = encoded(places)
        h = jax.nn.relu(inputs @ params["first"])
        for n, weight in enumerate(params["hidden"]):
            h = jax.nn.relu(h @ weight + (inputs @ params["skip"] if n == 2 else 0.0))
        colour, density = jax.nn.sigmoid(h @ params["colour"]), jax.nn.relu(h @ params["density"])[..., 0]
        alpha = 1 - jnp.exp(-density * (4.0 / samples))
        through = jnp.cumprod(jnp.concatenate([jnp.ones((rays, 1)), 1 - alpha[:, :-1] + 1e-10], 1), axis=1)
        seen = jnp.sum((alpha * through)[..., None] * colour, axis=1)
        return jnp.mean((seen - batch["colour"]) ** 2)

    params = arrays({"first": (60, d), "skip": (60, d), "hidden": [(d, d)] * 6, "colour": (d, 3), "density": (d, 1)})
    optimizer = optax.adam(5e-4)
    batch = {name: arrays((rays, 3)) for name in ("origin", "direction", "colour")}
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), batch)


def actor_critic() -> Subject:
    """Clipped policy gradients with advantages summed backwards by `lax.scan`; clipped Adam of optax."""
    steps, envs, d, actions = 64, 512, 2048, 32

    def loss(params, batch):
        h = jnp.tanh(batch["seen"] @ params["w1"] + params["b1"])
        h = jnp.tanh(h @ params["w2"] + params["b2"])
        logits, values = h @ params["actor"], (h @ params["critic"])[..., 0]
        held = jax.lax.stop_gradient(values)
        deltas = batch["reward"][:-1] + 0.99 * held[1:] - held[:-1]

        def back(total, delta):
            total = delta + 0.95 * total
            return total, total

        advantages = jax.lax.scan(back, jnp.zeros(envs), deltas, reverse=True)[1]
        chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["action"][..., None], axis=-1)[:-1, :, 0]
        ratio = jnp.exp(chosen - batch["log_probability"][:-1])
        policy = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 0.8, 1.2) * advantages).mean()
        critic = jnp.mean((values[:-1] - (advantages + held[:-1])) ** 2)
        entropy = -jnp.mean(jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1))
        return policy + 0.5 * critic - 0.01 * entropy

    params = {"w1": (1024, d), "b1": (d,), "w2": (d, d), "b2": (d,), "actor": (d, actions), "critic": (d, 1)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(3e-4))
    batch = {
        "seen": arrays((steps, envs, 1024)),
        "action": ints(steps, envs),
        "reward": arrays((steps, envs)),
        "log_probability": arrays((steps, envs)),
    }
    return Subject(optax_step(loss, optimizer), optax_state(arrays(params), optimizer), batch)


def perceiver() -> Subject:
    """A few latents that read a long input and think about it, all by `einsum` in one letter a dimension; Adam."""
    n, m, t, d, h, k = 32, 256, 8192, 1024, 16, 64

    def attend(p, z, x):
        q, u, v = (jnp.einsum(s, a, p[w].astype(BF16)) for s, a, w in (
            ("nmd,dhk->nhmk", z, "q"), ("ntd,dhk->nhtk", x, "k"), ("ntd,dhk->nhtk", x, "v")))  # fmt: skip
        a = jax.nn.softmax(jnp.einsum("nhmk,nhtk->nhmt", q, u).astype(jnp.float32) / k**0.5).astype(BF16)
        z = z + jnp.einsum("nhmk,hkd->nmd", jnp.einsum("nhmt,nhtk->nhmk", a, v), p["o"].astype(BF16))
        y = jax.nn.gelu(jnp.einsum("nmd,df->nmf", z, p["f"].astype(BF16)))
        return z + jnp.einsum("nmf,fd->nmd", y, p["g"].astype(BF16))

    def loss(params, batch):
        x = jnp.einsum("nti,id->ntd", batch["x"].astype(BF16), params["in"].astype(BF16))
        z = jnp.tile(params["latents"].astype(BF16), (n, 1, 1))
        z = attend(params["read"], z, x)
        for p in params["think"]:
            z = attend(p, z, z)
        y = jnp.einsum("nmd,dc->nc", z.astype(jnp.float32), params["out"]) / m
        return -jnp.mean(jnp.sum(batch["y"] * jax.nn.log_softmax(y), axis=-1))

    layer = {"q": (d, h, k), "k": (d, h, k), "v": (d, h, k), "o": (h, k, d), "f": (d, 4 * d), "g": (4 * d, d)}
    params = arrays({"in": (256, d), "latents": (1, m, d), "read": layer, "think": [layer] * 2, "out": (d, 1000)})
    return Subject(adam_step(loss), adam_state(params), {"x": arrays((n, t, 256)), "y": arrays((n, 1000))})


def wavenet() -> Subject:
    """Dilated causal convolutions over samples, gated, with summed skips; Adam of optax with weights averaged."""
    channels, levels, length = 256, 256, 8192

    def causal(x, kernel, dilation):
        return jax.lax.conv_general_dilated(
            x, kernel, (1,), [((kernel.shape[0] - 1) * dilation, 0)], rhs_dilation=(dilation,),
            dimension_numbers=("NWC", "WIO", "NWC"),
        )  # fmt: skip

    def loss(params, samples):
        x = jax.nn.one_hot(samples[:, :-1], levels) @ params["in"]
        total = 0.0
        for n, p in enumerate(params["layers"]):
            a, b = jnp.split(causal(x, p["kernel"], 2**n), 2, axis=-1)
            z = jnp.tanh(a) * jax.nn.sigmoid(b)
            total, x = total + z @ p["skip"], x + z @ p["out"]
        logits = jax.nn.relu(total) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, samples[:, 1:]).mean()

    layer = {"kernel": (2, channels, 2 * channels), "skip": (channels, channels), "out": (channels, channels)}
    params = arrays({"in": (levels, channels), "layers": [layer] * 6, "head": (channels, levels)})
    optimizer = optax.chain(optax.adam(1e-3), optax.ema(0.999))
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), ints(32, length + 1))
