"""Language models in plain JAX: a GPT of one projection weight, unrolled and scanned, a Llama, and a T5."""

import jax
import jax.numpy as jnp
import optax

from foreign.common import Subject, adam_state, adam_step, arrays, ints, layer_norm, optax_state, optax_step, rms_norm

BF16 = jnp.bfloat16


def _gpt_block(x, p):
    """x: [batch, length, d]; `qkv` is one weight [d, 3, heads, head]."""
    d_head = p["qkv"].shape[-1]
    h = layer_norm(x, p["ln1"], p["ln1_bias"])
    q, k, v = jnp.einsum("bld,dnhk->nblhk", h, p["qkv"].astype(BF16))
    scores = jnp.einsum("blhk,bmhk->bhlm", q, k).astype(jnp.float32) / jnp.sqrt(d_head)
    length = x.shape[1]
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -1e30)
    out = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores).astype(BF16), v)
    x = x + jnp.einsum("blhk,hkd->bld", out, p["o"].astype(BF16))
    h = layer_norm(x, p["ln2"], p["ln2_bias"])
    return x + jax.nn.gelu(h @ p["up"].astype(BF16)) @ p["down"].astype(BF16)


def _gpt_loss(params, tokens, blocks):
    x = jnp.take(params["embedding"].astype(BF16), tokens, axis=0)
    x = blocks(params, x)
    x = layer_norm(x, params["ln"], params["ln_bias"])
    logits = (x @ params["embedding"].astype(BF16).T).astype(jnp.float32)
    targets = jax.nn.one_hot(jnp.roll(tokens, -1, axis=1), logits.shape[-1])
    return -jnp.mean(jnp.sum(targets * jax.nn.log_softmax(logits), -1))


def _gpt_layer(d, ffn, heads):
    head = d // heads
    return {
        "qkv": (d, 3, heads, head),
        "o": (heads, head, d),
        "up": (d, ffn),
        "down": (ffn, d),
        **{name: (d,) for name in ("ln1", "ln1_bias", "ln2", "ln2_bias")},
    }


def gpt(num_layers: int, d: int = 4096, ffn: int = 16384, heads: int = 32, vocabulary: int = 32768) -> Subject:
    """A GPT of separate layers; tied embedding, one-hot loss, Adam by hand."""

    def blocks(params, x):
        for layer in params["layers"]:
            x = _gpt_block(x, layer)
        return x

    params = {
        "embedding": (vocabulary, d),
        "layers": [_gpt_layer(d, ffn, heads)] * num_layers,
        "ln": (d,),
        "ln_bias": (d,),
    }
    step = adam_step(lambda p, tokens: _gpt_loss(p, tokens, blocks))
    return Subject(step, adam_state(arrays(params)), ints(16, 2048))


def gpt_scanned(num_layers: int = 8) -> Subject:
    """The same with stacked layers, scanned and checkpointed."""
    d, ffn, heads, vocabulary = 4096, 16384, 32, 32768

    def blocks(params, x):
        return jax.lax.scan(jax.checkpoint(lambda x, layer: (_gpt_block(x, layer), None)), x, params["layers"])[0]

    stacked = {k: (num_layers, *shape) for k, shape in _gpt_layer(d, ffn, heads).items()}
    params = {"embedding": (vocabulary, d), "layers": stacked, "ln": (d,), "ln_bias": (d,)}
    step = adam_step(lambda p, tokens: _gpt_loss(p, tokens, blocks))
    return Subject(step, adam_state(arrays(params)), ints(16, 2048))


def _rotated(x, positions):
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000 ** (-jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    sin, cos = jnp.sin(angles).astype(x.dtype), jnp.cos(angles).astype(x.dtype)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def llama(num_layers: int = 2) -> Subject:
    """Grouped queries, rotary positions, gated feed-forward; AdamW of optax with clipping and a schedule."""
    d, ffn, heads, groups, head, vocabulary = 4096, 14336, 32, 8, 128, 32000

    def attention(p, x):
        positions = jnp.arange(x.shape[1], dtype=jnp.float32)
        q = _rotated(jnp.einsum("btd,dghk->btghk", x, p["wq"]).reshape(*x.shape[:2], heads, head), positions)
        k = _rotated(jnp.einsum("btd,dgk->btgk", x, p["wk"]), positions)
        v = jnp.einsum("btd,dgk->btgk", x, p["wv"])
        q = q.reshape(*x.shape[:2], groups, heads // groups, head)
        scores = jnp.einsum("btghk,bsgk->bghts", q, k, preferred_element_type=jnp.float32) * head**-0.5
        mask = positions[:, None] >= positions[None, :]
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1).astype(x.dtype)
        return jnp.einsum("btghk,ghkd->btd", jnp.einsum("bghts,bsgk->btghk", weights, v), p["wo"])

    def loss(params, batch):
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        x = params["tokens"][batch["inputs"]]
        for p in params["layers"]:
            x = x + attention(p, rms_norm(x, p["norm1"]))
            h = rms_norm(x, p["norm2"])
            x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        logits = jnp.dot(rms_norm(x, params["norm"]), params["head"], preferred_element_type=jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

    layer = {
        "wq": (d, groups, heads // groups, head),
        "wk": (d, groups, head),
        "wv": (d, groups, head),
        "wo": (groups, heads // groups, head, d),
        "gate": (d, ffn),
        "up": (d, ffn),
        "down": (ffn, d),
        "norm1": (d,),
        "norm2": (d,),
    }
    params = {"tokens": (vocabulary, d), "layers": [layer] * num_layers, "norm": (d,), "head": (d, vocabulary)}
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(3e-4, 10_000), b2=0.95)
    )
    state = optax_state(arrays(params), optimizer)
    return Subject(optax_step(loss, optimizer), state, {"inputs": ints(16, 2048), "targets": ints(16, 2048)})


def t5(num_layers: int = 2) -> Subject:
    """An encoder and a decoder with learned position biases; Adafactor."""
    d, ffn, heads, head, vocabulary, length = 2048, 5120, 32, 64, 32128, 512

    def attend(p, queries, keys, bias, mask):
        q = jnp.einsum("btd,dhk->bhtk", queries, p["q"])
        k = jnp.einsum("bsd,dhk->bhsk", keys, p["k"])
        v = jnp.einsum("bsd,dhk->bhsk", keys, p["v"])
        scores = jnp.matmul(q, k.swapaxes(-1, -2)).astype(jnp.float32) + bias
        weights = jax.nn.softmax(scores + mask, axis=-1).astype(queries.dtype)
        return jnp.einsum("bhtk,hkd->btd", weights @ v, p["o"])

    def feed_forward(p, x):
        return (jax.nn.gelu(x @ p["gate"]) * (x @ p["up"])) @ p["down"]

    def loss(params, batch):
        params = jax.tree.map(lambda w: w.astype(BF16), params)
        causal = jnp.where(jnp.tril(jnp.ones((length, length))) == 1, 0.0, -1e9)
        x = jnp.take(params["embedding"], batch["source"], axis=0)
        for p in params["encoder"]:
            h = rms_norm(x, p["norm1"])
            x = x + attend(p["own"], h, h, params["encoder_bias"], 0.0)
            x = x + feed_forward(p["ffn"], rms_norm(x, p["norm2"]))
        seen, y = x, jnp.take(params["embedding"], batch["target"], axis=0)
        for p in params["decoder"]:
            h = rms_norm(y, p["norm1"])
            y = y + attend(p["own"], h, h, params["decoder_bias"], causal)
            y = y + attend(p["cross"], rms_norm(y, p["norm3"]), seen, 0.0, 0.0)
            y = y + feed_forward(p["ffn"], rms_norm(y, p["norm2"]))
        logits = (y[:, :-1] @ params["head"]).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, batch["target"][:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    attention = {"q": (d, heads, head), "k": (d, heads, head), "v": (d, heads, head), "o": (heads, head, d)}
    ffn_shapes = {"gate": (d, ffn), "up": (d, ffn), "down": (ffn, d)}
    encoder = {"own": attention, "ffn": ffn_shapes, "norm1": (d,), "norm2": (d,)}
    decoder = encoder | {"cross": attention, "norm3": (d,)}
    params = {
        "embedding": (vocabulary, d),
        "head": (d, vocabulary),
        "encoder": [encoder] * num_layers,
        "decoder": [decoder] * num_layers,
        "encoder_bias": (heads, length, length),
        "decoder_bias": (heads, length, length),
    }
    optimizer = optax.adafactor(1e-3)
    state = optax_state(arrays(params), optimizer)
    return Subject(optax_step(loss, optimizer), state, {"source": ints(64, length), "target": ints(64, length)})


def bert(num_layers: int = 2) -> Subject:
    """Masked tokens by weight; separate biased projections, `Lion`."""
    d, heads, length, vocabulary = 1024, 16, 512, 30522

    def block(p, x):
        split = lambda y: y.reshape(*x.shape[:2], heads, d // heads).transpose(0, 2, 1, 3)
        q, k, v = (split(x @ p[n].astype(BF16) + p[n + "_bias"].astype(BF16)) for n in ("query", "key", "value"))
        weights = jax.nn.softmax((q @ k.transpose(0, 1, 3, 2)).astype(jnp.float32) * (d // heads) ** -0.5)
        mixed = (weights.astype(BF16) @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = layer_norm(x + mixed @ p["out"].astype(BF16), p["scale1"], p["shift1"])
        h = jax.nn.gelu(x @ p["up"].astype(BF16), approximate=False) @ p["down"].astype(BF16)
        return layer_norm(x + h, p["scale2"], p["shift2"])

    def loss(params, batch):
        x = (params["words"][batch["tokens"]] + params["positions"][None]).astype(BF16)
        for p in params["layers"]:
            x = block(p, x)
        scores = (x @ params["words"].T.astype(BF16)).astype(jnp.float32) + params["word_bias"]
        nll = -jnp.take_along_axis(jax.nn.log_softmax(scores), batch["labels"][..., None], axis=-1).squeeze(-1)
        return jnp.sum(nll * batch["weights"]) / jnp.maximum(jnp.sum(batch["weights"]), 1.0)

    layer = {name: (d, d) for name in ("query", "key", "value", "out")}
    layer |= {name: (d,) for name in ("query_bias", "key_bias", "value_bias", "scale1", "shift1", "scale2", "shift2")}
    layer |= {"up": (d, 4 * d), "down": (4 * d, d)}
    params = {"words": (vocabulary, d), "positions": (length, d), "word_bias": (vocabulary,)}
    params |= {"layers": [layer] * num_layers}
    optimizer = optax.lion(1e-4, weight_decay=0.01)
    batch = {"tokens": ints(128, length), "labels": ints(128, length), "weights": arrays((128, length))}
    return Subject(optax_step(loss, optimizer), optax_state(arrays(params), optimizer), batch)


def switch(num_layers: int = 2) -> Subject:
    """A mixture of experts by one-hot dispatch with a capacity; SGD with momentum of optax."""
    d, ffn, experts, heads, vocabulary, capacity = 1024, 4096, 16, 16, 32000, 128

    def mixture(p, x):
        probabilities = jax.nn.softmax((x @ p["router"].astype(BF16)).astype(jnp.float32))
        gate, choice = jnp.max(probabilities, -1), jnp.argmax(probabilities, -1)
        wanted = jax.nn.one_hot(choice, experts, dtype=jnp.float32)
        place = jnp.cumsum(wanted, axis=1) * wanted - 1.0
        dispatch = (wanted[..., None] * jax.nn.one_hot(place, capacity)).astype(BF16)
        inner = jnp.einsum("bsec,bsd->ebcd", dispatch, x)
        inner = jax.nn.relu(jnp.einsum("ebcd,edf->ebcf", inner, p["up"].astype(BF16)))
        inner = jnp.einsum("ebcf,efd->ebcd", inner, p["down"].astype(BF16))
        balance = experts * jnp.mean(jnp.mean(probabilities, 1) * jnp.mean(wanted, 1))
        return jnp.einsum("bsec,ebcd,bs->bsd", dispatch, inner, gate.astype(BF16)), balance

    def loss(params, tokens):
        x = params["embedding"].astype(BF16)[tokens]
        extra = 0.0
        for p in params["layers"]:
            h = rms_norm(x, p["norm1"])
            q, k, v = jnp.split(h @ p["qkv"].astype(BF16), 3, axis=-1)
            q, k, v = (y.reshape(*y.shape[:2], heads, -1) for y in (q, k, v))
            x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["out"].astype(BF16)
            h, balance = mixture(p, rms_norm(x, p["norm2"]))
            x, extra = x + h, extra + balance
        logits = (x @ params["head"].astype(BF16)).astype(jnp.float32)[:, :-1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean() + 0.01 * extra

    layer = {"qkv": (d, 3 * d), "out": (d, d), "router": (d, experts), "norm1": (d,), "norm2": (d,)}
    layer |= {"up": (experts, d, ffn), "down": (experts, ffn, d)}
    params = {"embedding": (vocabulary, d), "layers": [layer] * num_layers, "head": (d, vocabulary)}
    optimizer = optax.sgd(0.1, momentum=0.9, nesterov=True)
    return Subject(optax_step(loss, optimizer), optax_state(arrays(params), optimizer), ints(32, 1024))
