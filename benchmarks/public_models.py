"""Plans unchanged models of public libraries at full size, from shapes alone, for 64 H100, in four ways.

    python benchmarks/public_models.py                                # all, each in a process of its own; a table
    python benchmarks/public_models.py --model llama-7b --way mesh    # one
    python benchmarks/public_models.py --gemma FOLDER                 # also Flax's example, from its source archive

Needs `pip install transformers==4.46.3 diffusers==0.31.0 google-tunix==0.1.7`, which autoshard does not depend on.
Flax's Gemma is `examples/gemma` in the source archive of flax (`pip download --no-deps --no-binary :all: flax`).

Ways: `mesh`, a plain train step on data=8 and tensor=8; `search`, the same on all meshes; `step`, an
`autoshard.TrainStep` with default options; `forms`, with recomputation and micro-batches searched. AdamW; the state is
donated. Computed in bfloat16 with parameters in float32, but Llama 3.1 of tunix in float32, as it is built. The
solver's kernels are loaded before the clock starts; the cache of solutions is off.
"""

import argparse
import dataclasses
import json
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from foreign.common import arrays, ints, rms_norm

import autoshard
from autoshard.solver.warm_up import ALWAYS, SELDOM, WITHIN_CAPACITY, load_kernels

CLUSTER = pathlib.Path(__file__).parent.parent / "configs" / "clusters" / "h100x64.yaml"
WAYS = ("mesh", "search", "step", "forms")
BF16 = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Trial:
    """A loss `(params or NNX module, batch, key) -> scalar` with its abstract arguments."""

    loss: Callable[[Any, Any, jax.Array], jax.Array]
    params: Any
    batch: Any


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one model planned in one way; times in seconds.

    Attributes:
      jax_s: Of `jax.make_jaxpr`. plan_s, processor_s: What planning took more, by the clock and of the processor.
      peak_rss_bytes: Of the process. step_s, gap, peak_bytes: Of the plan; 0 where there is none.
      axes: Of the plan's mesh. form: What it recomputes, in how many micro-batches.
      error: Why there is no plan.
    """

    model: str
    way: str
    parameters: int
    jax_s: float
    plan_s: float
    processor_s: float
    peak_rss_bytes: int
    step_s: float = 0.0
    gap: float = 0.0
    peak_bytes: float = 0.0
    axes: str = ""
    form: str = ""
    warnings: tuple[str, ...] = ()
    error: str = ""


def next_token_loss(logits: jax.Array, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of each token given those before it."""
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1].astype(jnp.float32), tokens[:, 1:]).mean()


def hugging_face(name: str, loss: Callable[..., jax.Array], batch: Any, config: Any, **model_options: Any) -> Trial:
    """A model of transformers; `loss` is `(call, batch)`, where `call` is the model with parameters and keys bound."""
    import transformers

    model = getattr(transformers, f"Flax{name}")(config, dtype=BF16, _do_init=False, **model_options)
    params = jax.eval_shape(lambda: model.init_weights(jax.random.key(0), model.input_shape))

    def loss_fn(params, batch, key):
        return loss(lambda *a, **k: model(*a, params=params, dropout_rng=key, train=True, **k), batch)

    return Trial(loss_fn, params, batch)


def language_model(name: str, config: Any, batch_size: int, length: int) -> Trial:
    """A decoder of transformers, trained on the next token."""
    loss = lambda call, tokens: next_token_loss(call(tokens).logits, tokens)
    return hugging_face(name, loss, ints(batch_size, length), config)


def _llama(batch_size: int, num_layers: int = 32) -> Trial:
    from transformers import LlamaConfig

    return language_model("LlamaForCausalLM", LlamaConfig(num_hidden_layers=num_layers), batch_size, 2048)


def _gpt2(batch_size: int = 256, num_layers: int = 48) -> Trial:
    from transformers import GPT2Config

    config = GPT2Config(n_embd=1600, n_layer=num_layers, n_head=25)
    return language_model("GPT2LMHeadModel", config, batch_size, 1024)


def _mistral() -> Trial:
    from transformers import MistralConfig

    return language_model("MistralForCausalLM", MistralConfig(), 64, 2048)


def _t5(batch_size: int = 128, num_layers: int = 24) -> Trial:
    """T5 3B. Its `jnp.clip(..., a_max=)` is put back, which JAX has dropped."""
    from transformers import T5Config
    from transformers.models.t5 import modeling_flax_t5

    class Numpy:
        def __getattr__(self, name):
            return getattr(jnp, name)

        def clip(self, x, a_min=None, a_max=None):
            return jnp.clip(x, a_min, a_max)

    modeling_flax_t5.jnp = Numpy()
    sizes = dict(d_model=1024, d_kv=128, d_ff=16384, num_heads=32, num_layers=num_layers)

    def loss(call, batch):
        logits = call(batch["inputs"], decoder_input_ids=batch["targets"]).logits
        return next_token_loss(logits, batch["targets"])

    batch = {"inputs": ints(batch_size, 512), "targets": ints(batch_size, 512)}
    return hugging_face("T5ForConditionalGeneration", loss, batch, T5Config(**sizes))


def _whisper(batch_size: int, num_layers: int = 32) -> Trial:
    from transformers import WhisperConfig

    config = WhisperConfig(
        vocab_size=51865,
        d_model=1280,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
    )

    def loss(call, batch):
        return next_token_loss(call(batch["audio"], decoder_input_ids=batch["tokens"]).logits, batch["tokens"])

    batch = {"audio": jax.ShapeDtypeStruct((batch_size, 80, 3000), jnp.float32), "tokens": ints(batch_size, 448)}
    return hugging_face("WhisperForConditionalGeneration", loss, batch, config)


def _vit(batch_size: int = 1024, num_layers: int = 32) -> Trial:
    from transformers import ViTConfig

    config = ViTConfig(
        hidden_size=1280,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        intermediate_size=5120,
        patch_size=14,
        num_labels=1000,
    )

    def loss(call, batch):
        logits = call(batch["images"]).logits.astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()

    images = jax.ShapeDtypeStruct((batch_size, 3, 224, 224), jnp.float32)
    return hugging_face("ViTForImageClassification", loss, {"images": images, "labels": ints(batch_size)}, config)


def _bert(batch_size: int = 512, num_layers: int = 24) -> Trial:
    from transformers import BertConfig

    config = BertConfig(hidden_size=1024, num_hidden_layers=num_layers, num_attention_heads=16, intermediate_size=4096)

    def loss(call, batch):
        logits = call(batch["tokens"], attention_mask=batch["mask"]).logits.astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
        return jnp.sum(losses * batch["is_masked"]) / jnp.sum(batch["is_masked"])

    batch = {k: ints(batch_size, 512) for k in ("tokens", "mask", "labels", "is_masked")}
    return hugging_face("BertForMaskedLM", loss, batch, config)


def _unet(batch_size: int = 256) -> Trial:
    from diffusers import FlaxUNet2DConditionModel

    model = FlaxUNet2DConditionModel(
        sample_size=64,
        attention_head_dim=(5, 10, 20, 20),
        cross_attention_dim=1024,
        use_linear_projection=True,
        dtype=BF16,
    )
    params = jax.eval_shape(model.init_weights, jax.random.key(0))

    def loss_fn(params, batch, key):
        noise_key, dropout_key = jax.random.split(key)
        noise = jax.random.normal(noise_key, batch["latents"].shape)
        level = jnp.cos(batch["times"] / 1000 * jnp.pi / 2)[:, None, None, None]
        noisy = level * batch["latents"] + jnp.sqrt(1 - level**2) * noise
        rngs = {"dropout": dropout_key}
        predicted = model.apply({"params": params}, noisy, batch["times"], batch["text"], train=True, rngs=rngs)
        return jnp.mean((predicted.sample - noise) ** 2)

    latents, text = arrays((batch_size, 4, 64, 64)), arrays((batch_size, 77, 1024))
    return Trial(loss_fn, params, {"latents": latents, "times": ints(batch_size), "text": text})


def decoder_module(make: Callable[[], nnx.Module], batch_size: int, length: int) -> Trial:
    """A decoder in NNX that takes tokens, positions, a cache and a mask, as those of tunix and Flax's Gemma do."""

    def loss_fn(module, tokens, key):
        positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((length, length), bool)), (len(tokens), length, length))
        return next_token_loss(module(tokens, positions, None, mask)[0], tokens)

    return Trial(loss_fn, nnx.eval_shape(make), ints(batch_size, length))


def _free(config: Any, **changes: Any) -> Any:
    """A configuration of tunix whose variables name no mesh axes, which would bind; with other changes."""
    named = {f.name: None for f in dataclasses.fields(config.shd_config)}
    return dataclasses.replace(config, shd_config=dataclasses.replace(config.shd_config, **named), **changes)


def _tunix_llama(batch_size: int = 64, **changes: Any) -> Trial:
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = _free(ModelConfig.llama3p1_8b(), **changes)
    return decoder_module(lambda: Llama3(config, rngs=nnx.Rngs(0)), batch_size, 2048)


def _tunix_qwen(size: str, batch_size: int = 64, **changes: Any) -> Trial:
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = _free(getattr(ModelConfig, f"qwen3_{size}")(), dtype=BF16, **changes)
    return decoder_module(lambda: Qwen3(config, rngs=nnx.Rngs(0)), batch_size, 2048)


def _gemma(batch_size: int = 64) -> Trial:
    """Gemma 2 9B of Flax's example, whose folder `--gemma` puts on the path."""
    import transformer  # pyright: ignore[reportMissingImports]
    from transformer_cfg import TransformerConfig  # pyright: ignore[reportMissingImports]

    config = TransformerConfig.gemma2_9b(dtype=BF16)
    return decoder_module(lambda: transformer.Transformer(config, rngs=nnx.Rngs(0)), batch_size, 2048)


class _Layer(nn.Module):
    """A decoder layer as in MaxText: grouped heads, rotary positions, gated MLP, kernels with named dimensions."""

    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    ffn: int = 14336

    @nn.compact
    def __call__(self, x, positions):
        weight = lambda name, shape, axes: self.param(
            name, nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes), shape
        ).astype(BF16)
        d, h, k, n = x.shape[-1], self.heads, self.kv_heads, self.head_dim
        y = rms_norm(x, self.param("before_attention", nn.initializers.ones, (d,)))
        query = jnp.einsum("bsd,dhn->bshn", y, weight("query", (d, h, n), ("embed", "heads", "kv")))
        key = jnp.einsum("bsd,dkn->bskn", y, weight("key", (d, k, n), ("embed", "kv_heads", "kv")))
        value = jnp.einsum("bsd,dkn->bskn", y, weight("value", (d, k, n), ("embed", "kv_heads", "kv")))
        turns = positions[..., None, None] / 10000 ** (jnp.arange(n // 2) / (n // 2))

        def rotated(x):
            a, b = jnp.split(x, 2, axis=-1)
            sin, cos = jnp.sin(turns), jnp.cos(turns)
            return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(BF16)

        query = rotated(query).reshape(*x.shape[:2], k, h // k, n)
        scores = jnp.einsum("bskgn,btkn->bkgst", query, rotated(key)).astype(jnp.float32) / n**0.5
        scores = jnp.where(positions[:, None, None, :, None] >= positions[:, None, None, None, :], scores, -1e9)
        mixed = jnp.einsum("bkgst,btkn->bskgn", jax.nn.softmax(scores).astype(BF16), value)
        mixed = mixed.reshape(*x.shape[:2], h, n)
        x = x + jnp.einsum("bshn,hnd->bsd", mixed, weight("out", (h, n, d), ("heads", "kv", "embed")))
        y = rms_norm(x, self.param("before_mlp", nn.initializers.ones, (d,)))
        gate = jnp.einsum("bsd,df->bsf", y, weight("gate", (d, self.ffn), ("embed", "mlp")))
        up = jnp.einsum("bsd,df->bsf", y, weight("up", (d, self.ffn), ("embed", "mlp")))
        y = jax.nn.silu(gate) * up
        return x + jnp.einsum("bsf,fd->bsd", y, weight("down", (self.ffn, d), ("mlp", "embed"))), None


class _Scanned(nn.Module):
    """All layers in one `nn.scan` under `nn.remat` with a policy, as MaxText has it."""

    num_layers: int = 32
    d: int = 4096
    vocabulary: int = 128256

    @nn.compact
    def __call__(self, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        x = nn.Embed(self.vocabulary, self.d, dtype=BF16)(tokens)
        policy = jax.checkpoint_policies.save_only_these_names()
        layer = nn.remat(_Layer, policy=policy, prevent_cse=False)
        scanned = nn.scan(
            layer,
            {"params": 0},
            split_rngs={"params": True},
            in_axes=nn.broadcast,
            length=self.num_layers,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = scanned()(x, positions)
        x = rms_norm(x, self.param("norm", nn.initializers.ones, (self.d,)))
        return nn.Dense(self.vocabulary, use_bias=False, dtype=BF16)(x)


def _scanned(batch_size: int = 256, **changes: Any) -> Trial:
    model, tokens = _Scanned(**changes), ints(batch_size, 2048)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    return Trial(lambda params, tokens, key: next_token_loss(model.apply(params, tokens), tokens), params, tokens)


MODELS: dict[str, Callable[[], Trial]] = {
    "llama-7b": lambda: _llama(64),
    "llama-7b-128": lambda: _llama(128),
    "gpt2-xl": _gpt2,
    "mistral-7b": _mistral,
    "t5-3b": _t5,
    "whisper-large": lambda: _whisper(128),
    "whisper-large-256": lambda: _whisper(256),
    "vit-huge": _vit,
    "bert-large": _bert,
    "unet-sd2": _unet,
    "tunix-llama3.1-8b": _tunix_llama,
    "tunix-qwen3-8b": lambda: _tunix_qwen("8b"),
    "tunix-qwen3-experts": lambda: _tunix_qwen("30b_a3b", num_layers=4),
    "scanned-8b": _scanned,
    "gemma2-9b": _gemma,
}


def step_and_state(trial: Trial, way: str) -> tuple[Any, Any]:
    """The train step for one way of planning, and its abstract state."""
    optimizer = optax.adamw(1e-4)
    train_step = autoshard.TrainStep(trial.loss, optimizer)
    state = jax.eval_shape(train_step.init, trial.params)
    if way in ("step", "forms"):
        return train_step, state
    if not isinstance(trial.params, nnx.Module):
        graphdef, state_of = None, lambda params: (params, optimizer.init(params), jax.random.key(0))
        params = trial.params
    else:
        graphdef, params, rest = nnx.split(trial.params, nnx.Param, ...)
        state_of = lambda params: (params, optimizer.init(params), jax.random.key(0))

    def plain_step(state, batch):
        params, opt_state, key = state
        key, key_of_step = jax.random.split(key)

        def loss_of(params):
            model = params if graphdef is None else nnx.merge(graphdef, params, rest)
            return trial.loss(model, batch, key_of_step)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, key), loss

    return plain_step, jax.eval_shape(state_of, params)


def measure(model: str, way: str) -> Row:
    """Plans once."""
    trial = MODELS[model]()
    params = nnx.state(trial.params, nnx.Param) if isinstance(trial.params, nnx.Module) else trial.params
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    step, state = step_and_state(trial, way)
    load_kernels(ALWAYS + WITHIN_CAPACITY + SELDOM)
    began = time.perf_counter(), time.process_time()
    jax.make_jaxpr(step)(state, trial.batch)
    jax_s, jax_processor_s = time.perf_counter() - began[0], time.process_time() - began[1]
    jax.clear_caches()
    searched = {"remat": "search", "micro_batches": "search"} if way == "forms" else {}
    tell = lambda p: print(f"{p.elapsed_s:7.1f} s {p.stage}: {p.detail}", file=sys.stderr, flush=True)
    options = autoshard.PlanOptions(cache=False, on_progress=tell, **searched)
    mesh = {"data": 8, "tensor": 8} if way == "mesh" else None
    began, plan, error = (time.perf_counter(), time.process_time()), None, ""
    try:
        plan = autoshard.plan(step, state, trial.batch, cluster=CLUSTER, mesh=mesh, donate_argnums=0, options=options)
    except autoshard.AutoshardError as e:
        error = f"{type(e).__name__}: {e}"
    total_s, processor_s = time.perf_counter() - began[0], time.process_time() - began[1]
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    row = Row(model, way, count, jax_s, total_s - jax_s, processor_s - jax_processor_s, peak_rss, error=error)
    if plan is None:
        return row
    return dataclasses.replace(
        row,
        step_s=plan.estimate.step_s,
        gap=plan.certificate.gap,
        peak_bytes=plan.estimate.peak_bytes,
        axes=",".join(f"{k}={v}" for k, v in plan.axes),
        form=str(getattr(plan, "choice", None) or ""),
        warnings=tuple(plan.warnings),
    )


def _in_own_process(model: str, way: str, gemma: str | None) -> Row | None:
    """A row; None if the process died."""
    command = [sys.executable, __file__, "--model", model, "--way", way, "--json"]
    command += ["--gemma", gemma] if gemma else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return None if done.returncode else Row(**json.loads(done.stdout.splitlines()[-1]))


def _told(row: Row) -> str:
    """A row of the Markdown table."""
    cells = [row.model, row.way, f"{row.parameters / 1e9:.2f}", f"{row.jax_s:.1f} s", f"{row.plan_s:.1f} s"]
    cells += [f"{row.processor_s:.1f} s", f"{row.peak_rss_bytes / 1e9:.2f} GB"]
    if row.error:
        cells += ["", "", "", "", row.error.split(". ")[0]]
    else:
        cells += [f"{1e3 * row.step_s:.1f} ms", f"{row.gap:.2%}", f"{row.peak_bytes / 1e9:.1f} GB", row.axes, row.form]
    return f"| {' | '.join(cells)} |"


_TITLES = (
    *("model", "way", "billion parameters", "jax", "planned in", "processor", "memory of the planner"),
    *("step", "gap", "peak", "mesh", "form"),
)


def main() -> None:
    """Prints the table, and on standard error what is going on and the warnings of plans; or one row as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="only these, with commas between them")
    parser.add_argument("--way", help=f"only these of {', '.join(WAYS)}")
    parser.add_argument("--gemma", help="folder of Flax's Gemma example")
    parser.add_argument("--json", action="store_true", help="in this process, as JSON")
    chosen = parser.parse_args()
    if chosen.gemma:
        sys.path.insert(0, chosen.gemma)
    every = [m for m in MODELS if m != "gemma2-9b" or chosen.gemma]
    models = chosen.model.split(",") if chosen.model else every
    if not chosen.json:
        print(f"| {' | '.join(_TITLES)} |\n|{' --- |' * len(_TITLES)}", flush=True)
    for model in models:
        for way in chosen.way.split(",") if chosen.way else WAYS:
            if chosen.json:
                print(json.dumps(dataclasses.asdict(measure(model, way))), flush=True)
                continue
            row = _in_own_process(model, way, chosen.gemma)
            print(_told(row) if row else f"| {model} | {way} | the process died |", flush=True)
            for warning in row.warnings if row else ():
                print(f"{model}, {way}: {warning}", file=sys.stderr)


if __name__ == "__main__":
    main()
