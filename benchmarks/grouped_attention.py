"""Attention whose heads of queries share heads of keys, as public models write it: kernels and memory.

    python benchmarks/grouped_attention.py                # all forms
    python benchmarks/grouped_attention.py --form jax.nn  # one of them

Needs the extra `verify-gpu`, no GPU. One layer of attention, forward and backward, 16 sequences of 1,024 tokens, 32
heads of 64 that share 8 (or all their own, for comparison), on eight H100 as data=8, so that scores are what takes
memory. Planned, compiled by XLA:GPU in the order of least memory, and replayed: what kernels take, and what is
reserved, beside the predictions. One line a form goes to benchmarks/results/grouped-attention.md.
"""

import argparse
import functools
from collections.abc import Callable

import exposed
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiler.candidates import Candidate, candidate_options
from autoshard.execution.jit import device_mesh
from autoshard.hlo.compiled_schedule import replay
from autoshard.hlo.module import parse
from autoshard.plans.apply import planned_function
from autoshard.verify.devices import gpu_devices
from autoshard.verify.gpus import COMPILER_OPTIONS, H100

SEQUENCES, TOKENS, KEY_HEADS, GROUP, HEAD_DIM = 16, 1024, 8, 4, 64
WIDTH = KEY_HEADS * GROUP * HEAD_DIM
RESULTS = exposed.RESULTS / "grouped-attention.md"
_HEAD = "| form | backward | kernels, ms | compiled | ratio | reserved, MB | compiled | ratio |\n|" + " --- |" * 8

Array = jax.Array


def _masked(scores: Array) -> Array:
    queries, keys = scores.shape[-2:]
    return jnp.where(jnp.tril(jnp.ones((queries, keys), bool)), scores, -1e30)


def grouped(query: Array, key: Array, value: Array) -> Array:
    """Scores in bfloat16, softmax in float32: queries (batch, tokens, heads, group, head_dim)."""
    weights = jax.nn.softmax(_masked(jnp.einsum("bqhgd,bkhd->bhgqk", query, key).astype(jnp.float32)))
    return jnp.einsum("bhgqk,bkhd->bqhgd", weights.astype(value.dtype), value)


def scores_in_float32(query: Array, key: Array, value: Array) -> Array:
    """The product itself makes float32."""
    scores = jnp.einsum("bqhgd,bkhd->bhgqk", query, key, preferred_element_type=jnp.float32)
    return jnp.einsum("bhgqk,bkhd->bqhgd", jax.nn.softmax(_masked(scores)).astype(value.dtype), value)


def divided_last(query: Array, key: Array, value: Array) -> Array:
    """Exponentials times values, divided by their sums, as in attention that is merged over parts."""
    scores = _masked(jnp.einsum("bqhgd,bkhd->bhgqk", query, key).astype(jnp.float32))
    exponentials = jnp.exp(scores - scores.max(-1, keepdims=True))
    sums = jnp.moveaxis(exponentials.sum(-1, keepdims=True), (1, 2, 3), (2, 3, 1)).astype(value.dtype)
    return jnp.einsum("bhgqk,bkhd->bqhgd", exponentials.astype(value.dtype), value) / sums


def of_jax(query: Array, key: Array, value: Array) -> Array:
    """`jax.nn.dot_product_attention`."""
    query = query.reshape(*query.shape[:2], -1, HEAD_DIM)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="xla")


def in_blocks(query: Array, key: Array, value: Array) -> Array:
    """Four blocks of queries in a loop, each computed again in the backward pass."""

    @jax.checkpoint
    def run(_: None, block: Array) -> tuple[None, Array]:
        return None, grouped(block, key, value)

    blocks = query.reshape(query.shape[0], 4, -1, *query.shape[2:]).swapaxes(0, 1)
    return jax.lax.scan(run, None, blocks)[1].swapaxes(0, 1).reshape(query.shape)


FORMS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "grouped": grouped,
    "scores in float32": scores_in_float32,
    "divided last": divided_last,
    "jax.nn": of_jax,
    "in blocks": in_blocks,
}
BACKWARD: dict[str, Callable[[Callable[..., Array]], Callable[..., Array]]] = {
    "keeps all": lambda f: f,
    "keeps products": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable),
    "computes again": jax.checkpoint,
}


def step_of(attention: Callable[..., Array]) -> Callable[..., tuple[Array, ...]]:
    """The gradients of a layer of attention with its projections."""

    def layer(x: Array, w_q: Array, w_k: Array, w_v: Array, w_out: Array) -> Array:
        query = (x @ w_q).reshape(*x.shape[:2], KEY_HEADS, GROUP, HEAD_DIM)
        key, value = ((x @ w).reshape(*x.shape[:2], KEY_HEADS, HEAD_DIM) for w in (w_k, w_v))
        return attention(query, key, value).reshape(x.shape) @ w_out

    def step(x: Array, w_q: Array, w_k: Array, w_v: Array, w_out: Array) -> tuple[Array, ...]:
        loss = lambda *args: jnp.sum(layer(*args).astype(jnp.float32) ** 2)
        return jax.grad(loss, (0, 1, 2, 3, 4))(x, w_q, w_k, w_v, w_out)

    return step


def row(form: str, backward: str) -> str:
    """The line of a form: predicted and compiled."""
    step = step_of(BACKWARD[backward](FORMS[form]))
    bf16 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    narrow = bf16(WIDTH, KEY_HEADS * HEAD_DIM)
    args = bf16(SEQUENCES, TOKENS, WIDTH), bf16(WIDTH, WIDTH), narrow, narrow, bf16(WIDTH, WIDTH)
    pins = {"x": P("data"), **dict.fromkeys(("w_q", "w_k", "w_v", "w_out"), P())}
    options = autoshard.PlanOptions(schedule=autoshard.Schedule.LEAST_MEMORY, cache=False)
    plan = autoshard.plan(step, *args, cluster=exposed.cluster_of(8), mesh={"data": 8}, pins=pins, options=options)
    run = planned_function(plan, step, device_mesh(plan.axes, gpu_devices(H100, 8, exposed.PER_NODE)))
    choice = {**COMPILER_OPTIONS, **candidate_options("cuda", Candidate.LEAST_MEMORY)}
    compiled = run.compile_as(args)(Candidate.LEAST_MEMORY, choice)
    replayed_s = replay(parse(compiled.as_text()), plan.interface.choosing.mesh).kernel_s
    memory = compiled.memory_analysis()
    needed_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    needed_bytes -= memory.alias_size_in_bytes
    estimate = plan.estimate
    reserved_bytes = estimate.reserved_bytes or estimate.peak_bytes
    figures = (
        f"{estimate.compute_s * 1e3:.2f} | {replayed_s * 1e3:.2f} | {estimate.compute_s / replayed_s:.2f}",
        f"{reserved_bytes / 1e6:.0f} | {needed_bytes / 1e6:.0f} | {reserved_bytes / needed_bytes:.3f}",
    )
    return " ".join(("|", form, "|", backward, "|", figures[0], "|", figures[1], "|"))


def main() -> None:
    """Prints the lines as they come; those of all forms are written to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=FORMS, help="this one alone, and write nothing")
    arguments = parser.parse_args()
    title = "Grouped attention as planned and as compiled for H100s (`python benchmarks/grouped_attention.py`).\n"
    lines = [title, _HEAD]
    print(_HEAD)
    for form in [arguments.form] if arguments.form else FORMS:
        for backward in BACKWARD:
            lines.append(row(form, backward))
            print(lines[-1], flush=True)
    if not arguments.form:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
