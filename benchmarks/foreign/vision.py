"""Images in plain JAX: a transformer of patches, a mixer, a residual network, a denoising U-net, an autoencoder."""

import jax
import jax.numpy as jnp
import optax

from foreign.common import (
    Subject,
    adam_state,
    adam_step,
    arrays,
    ints,
    layer_norm,
    momentum_step,
    optax_state,
    optax_step,
)

BF16 = jnp.bfloat16


def vit(num_layers: int = 2) -> Subject:
    """Patches cut by a reshape, heads by `vmap`, a class token; optax with different rates for head and trunk."""
    d, heads, patch, side, classes = 1024, 16, 16, 224, 1000
    num_patches = (side // patch) ** 2

    def attend(q, k, v):  # one head: [length, head]
        return jax.nn.softmax(q @ k.T / jnp.sqrt(q.shape[-1])) @ v

    def block(p, x):
        h = layer_norm(x, p["s1"], p["b1"])
        q, k, v = (jnp.einsum("nld,hdk->nhlk", h, p[n].astype(BF16)) for n in ("q", "k", "v"))
        mixed = jax.vmap(jax.vmap(attend))(q, k, v)
        x = x + jnp.einsum("nhlk,hkd->nld", mixed, p["o"].astype(BF16))
        h = layer_norm(x, p["s2"], p["b2"])
        return x + jax.nn.gelu(h @ p["w1"].astype(BF16)) @ p["w2"].astype(BF16)

    def loss(params, batch):
        n = batch["image"].shape[0]
        x = batch["image"].reshape(n, side // patch, patch, side // patch, patch, 3)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(n, num_patches, patch * patch * 3).astype(BF16)
        trunk = params["trunk"]
        x = x @ trunk["patch"].astype(BF16)
        token = jnp.broadcast_to(trunk["token"].astype(BF16), (n, 1, d))
        x = jnp.concatenate([token, x], axis=1) + trunk["position"].astype(BF16)
        for p in trunk["layers"]:
            x = block(p, x)
        logits = x[:, 0].astype(jnp.float32) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    head = d // heads
    layer = {"q": (heads, d, head), "k": (heads, d, head), "v": (heads, d, head), "o": (heads, head, d)}
    layer |= {"w1": (d, 4 * d), "w2": (4 * d, d), **{name: (d,) for name in ("s1", "b1", "s2", "b2")}}
    trunk = {"patch": (patch * patch * 3, d), "token": (1, 1, d), "position": (num_patches + 1, d)}
    params = arrays({"trunk": trunk | {"layers": [layer] * num_layers}, "head": (d, classes)})
    optimizer = optax.multi_transform(
        {"trunk": optax.adamw(1e-4), "head": optax.sgd(1e-2, momentum=0.9)}, {"trunk": "trunk", "head": "head"}
    )
    batch = {"image": arrays((256, side, side, 3)), "label": ints(256)}
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), batch)


def mixer(num_layers: int = 4) -> Subject:
    """Mixing of patches and of channels by turns, by transposing; Adam by hand."""
    d, tokens, inner, classes = 1024, 256, 512, 1000

    def loss(params, batch):
        x = batch["patches"].astype(BF16) @ params["embed"].astype(BF16)
        for p in params["layers"]:
            y = layer_norm(x, p["s1"], p["b1"]).swapaxes(1, 2)
            x = x + (jax.nn.gelu(y @ p["t1"].astype(BF16)) @ p["t2"].astype(BF16)).swapaxes(1, 2)
            y = layer_norm(x, p["s2"], p["b2"])
            x = x + jax.nn.gelu(y @ p["c1"].astype(BF16)) @ p["c2"].astype(BF16)
        logits = x.astype(jnp.float32).mean(axis=1) @ params["head"]
        return -jnp.mean(jnp.sum(jax.nn.one_hot(batch["label"], classes) * jax.nn.log_softmax(logits), axis=-1))

    layer = {"t1": (tokens, inner), "t2": (inner, tokens), "c1": (d, 4 * d), "c2": (4 * d, d)}
    layer |= {name: (d,) for name in ("s1", "b1", "s2", "b2")}
    params = arrays({"embed": (768, d), "layers": [layer] * num_layers, "head": (d, classes)})
    batch = {"patches": arrays((256, tokens, 768)), "label": ints(256)}
    return Subject(adam_step(loss), adam_state(params), batch)


def _conv(x, kernel, stride=1):
    return jax.lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _group_norm(x, scale, bias, groups=32):
    n, h, w, c = x.shape
    y = x.astype(jnp.float32).reshape(n, h, w, groups, c // groups)
    mean, var = y.mean((1, 2, 4), keepdims=True), y.var((1, 2, 4), keepdims=True)
    y = ((y - mean) * jax.lax.rsqrt(var + 1e-5)).reshape(x.shape)
    return (y * scale + bias).astype(x.dtype)


def residual_network() -> Subject:
    """Two blocks of convolutions in each of three resolutions; heavy-ball momentum by hand."""
    widths, classes = (256, 512, 1024), 1000

    def loss(params, batch):
        x = _conv(batch["image"].astype(BF16), params["stem"], 4)
        for stage in params["stages"]:
            x = _conv(x, stage["down"], 2)
            for p in stage["blocks"]:
                y = _conv(jax.nn.relu(_group_norm(x, p["s1"], p["b1"])), p["k1"])
                x = x + _conv(jax.nn.relu(_group_norm(y, p["s2"], p["b2"])), p["k2"])
        logits = x.astype(jnp.float32).mean((1, 2)) @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    block = lambda w: {"k1": (3, 3, w, w), "k2": (3, 3, w, w), "s1": (w,), "b1": (w,), "s2": (w,), "b2": (w,)}
    stages = [
        {"down": (3, 3, before, w), "blocks": [block(w)] * 2} for before, w in zip((128, *widths), widths, strict=False)
    ]
    params = arrays({"stem": (7, 7, 3, 128), "stages": stages, "head": (widths[-1], classes)})
    batch = {"image": arrays((128, 128, 128, 3)), "label": ints(128)}
    return Subject(momentum_step(loss), (params, params), batch)


def denoiser() -> Subject:
    """A U-net that predicts the noise, its time by sines, skips by concatenation; Adam by hand, an average of weights.

    The noise is drawn in the step from a key in the state.
    """
    widths = (128, 256, 512)

    def network(params, x, time):
        half = widths[0] // 2
        angles = time[:, None] * jnp.exp(-jnp.log(1e4) * jnp.arange(half) / half)
        emb = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        emb = jax.nn.silu(emb @ params["time1"]) @ params["time2"]

        def block(p, x):
            y = _conv(jax.nn.silu(_group_norm(x, p["s1"], p["b1"])), p["k1"])
            y = y + (jax.nn.silu(emb) @ p["time"])[:, None, None].astype(y.dtype)
            y = _conv(jax.nn.silu(_group_norm(y, p["s2"], p["b2"])), p["k2"])
            return y + jnp.einsum("nhwc,cd->nhwd", x, p["skip"].astype(x.dtype))

        x = _conv(x.astype(BF16), params["stem"])
        kept = []
        for p in params["down"]:
            x = block(p["block"], x)
            kept.append(x)
            x = _conv(x, p["conv"], 2)
        x = block(params["middle"], x)
        for p, skip in zip(params["up"], reversed(kept), strict=True):
            n, h, w, c = x.shape
            x = jnp.broadcast_to(x[:, :, None, :, None], (n, h, 2, w, 2, c)).reshape(n, 2 * h, 2 * w, c)
            x = block(p["block"], jnp.concatenate([x, skip], axis=-1))
        return _conv(x, params["out"]).astype(jnp.float32)

    def loss(params, batch):
        key = jax.random.key(batch["seed"])
        noise = jax.random.normal(key, batch["image"].shape)
        level = jnp.cos(batch["time"] * jnp.pi / 2)[:, None, None, None]
        mixed = level * batch["image"] + jnp.sqrt(1 - level**2) * noise
        return jnp.mean((network(params, mixed, batch["time"]) - noise) ** 2)

    inner = adam_step(loss)

    def step(state, batch):
        adam, value = inner(state["adam"], batch)
        average = jax.tree.map(lambda a, p: 0.999 * a + 0.001 * p, state["average"], adam["params"])
        return {"adam": adam, "average": average}, value

    def block(before, after):
        shapes = {"k1": (3, 3, before, after), "k2": (3, 3, after, after), "skip": (before, after)}
        return shapes | {"s1": (before,), "b1": (before,), "s2": (after,), "b2": (after,), "time": (512, after)}

    a, b, c = widths
    down = [{"block": block(w, after), "conv": (3, 3, after, after)} for w, after in ((a, a), (a, b), (b, c))]
    up = [{"block": block(before, after)} for before, after in ((c + c, c), (c + b, b), (b + a, a))]
    params = arrays(
        {"stem": (3, 3, 3, a), "out": (3, 3, a, 3), "time1": (a, 512), "time2": (512, 512), "down": down, "up": up}
        | {"middle": block(c, c)}
    )
    batch = {"image": arrays((64, 64, 64, 3)), "time": arrays((64,)), "seed": jax.ShapeDtypeStruct((), jnp.uint32)}
    return Subject(step, {"adam": adam_state(params), "average": params}, batch)


def autoencoder() -> Subject:
    """A variational autoencoder of dense layers in float32, with a tuple for each layer; RMSProp."""
    sizes, latent = (3072, 8192, 4096), 256

    def dense(layer, x):
        weight, bias = layer
        return jnp.dot(x, weight) + bias

    def loss(params, batch):
        encoder, decoder = params
        h = batch["image"]
        for layer in encoder[:-1]:
            h = jax.nn.relu(dense(layer, h))
        mean, log_variance = jnp.split(dense(encoder[-1], h), 2, axis=-1)
        h = mean + jnp.exp(0.5 * log_variance) * batch["noise"]
        for layer in decoder[:-1]:
            h = jax.nn.relu(dense(layer, h))
        logits = dense(decoder[-1], h)
        likelihood = jnp.sum(jax.nn.log_sigmoid(jnp.where(batch["image"] > 0.5, logits, -logits)), axis=-1)
        divergence = 0.5 * jnp.sum(jnp.exp(log_variance) + mean**2 - 1 - log_variance, axis=-1)
        return jnp.mean(divergence - likelihood)

    pairs = lambda widths: [((a, b), (b,)) for a, b in zip(widths, widths[1:], strict=False)]
    is_shape = lambda node: isinstance(node, tuple) and isinstance(node[0], int)
    shapes = (pairs((*sizes, 2 * latent)), pairs((latent, *reversed(sizes))))
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=is_shape)
    optimizer = optax.rmsprop(1e-3, momentum=0.9)
    batch = {"image": arrays((4096, sizes[0])), "noise": arrays((4096, latent))}
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), batch)


def two_towers(num_layers: int = 2) -> Subject:
    """Pictures and captions drawn together by a contrastive loss over the whole batch; AdamW, masked weight decay."""
    d, heads, vocabulary, length, patches = 768, 12, 49408, 76, 196

    def block(p, x, is_causal):
        h = layer_norm(x, p["s1"], p["b1"])
        q, k, v = (y.reshape(*x.shape[:2], heads, -1) for y in jnp.split(h @ p["qkv"].astype(BF16), 3, axis=-1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=is_causal).reshape(x.shape) @ p["out"].astype(BF16)
        h = layer_norm(x, p["s2"], p["b2"])
        h = h @ p["up"].astype(BF16)
        return x + (h * jax.nn.sigmoid(1.702 * h)) @ p["down"].astype(BF16)

    def tower(p, x, is_causal):
        for layer in p["layers"]:
            x = block(layer, x, is_causal)
        return x

    def loss(params, batch):
        seen = params["image"]
        x = batch["patches"].astype(BF16) @ seen["patch"].astype(BF16) + seen["position"].astype(BF16)
        pictures = tower(seen, x, False).mean(1).astype(jnp.float32) @ seen["project"]
        read = params["text"]
        y = jnp.take(read["words"], batch["tokens"], axis=0).astype(BF16) + read["position"].astype(BF16)
        captions = tower(read, y, True)[:, -1].astype(jnp.float32) @ read["project"]
        pictures = pictures / jnp.linalg.norm(pictures, axis=-1, keepdims=True)
        captions = captions / jnp.linalg.norm(captions, axis=-1, keepdims=True)
        logits = jnp.exp(params["scale"]) * pictures @ captions.T
        labels = jnp.arange(logits.shape[0])
        both = [optax.softmax_cross_entropy_with_integer_labels(l, labels) for l in (logits, logits.T)]
        return (both[0].mean() + both[1].mean()) / 2

    layer = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    layer |= {name: (d,) for name in ("s1", "b1", "s2", "b2")}
    tower_shapes = {"layers": [layer] * num_layers, "project": (d, 512)}
    params = arrays(
        {
            "image": tower_shapes | {"patch": (768, d), "position": (patches, d)},
            "text": tower_shapes | {"words": (vocabulary, d), "position": (length, d)},
            "scale": (),
        }
    )
    optimizer = optax.adamw(1e-4, mask=lambda p: jax.tree.map(lambda w: len(w.shape) > 1, p))
    batch = {"patches": arrays((512, patches, 768)), "tokens": ints(512, length)}
    return Subject(optax_step(loss, optimizer), optax_state(params, optimizer), batch)
