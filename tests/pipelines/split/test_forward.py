"""The loss of a micro-batch as one program: what it takes and gives, and which of its equations belong to layers."""

import jax
import jax.numpy as jnp
import optax

from autoshard.pipelines.split.forward import trace_forward
from autoshard.train_step import TrainStep


def traced(loss, params, batch, size: int = 2, mutable=None):
    step = TrainStep(loss, optax.sgd(0.1), has_mutable=mutable is not None)
    return trace_forward(step, step.init(params, jax.random.key(0), mutable), batch, size)


def main_names(forward) -> list[str]:
    return [forward.jaxpr.eqns[i].primitive.name for i in forward.main]


def loss_with_all(params, mutable, batch, key):
    """Everything that a loss can read and give."""
    kept = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    x = jnp.where(kept, batch["x"], 0.0) @ jnp.float32(params["w"]["kernel"])
    new = {"mean": 0.5 * mutable["mean"] + jnp.mean(x), "spare": mutable["spare"]}
    return jnp.mean(x**2), (new, {"largest": jnp.max(jnp.abs(batch["x"])), "rows": jnp.int32(batch["x"].shape[0])})


PARAMS = {"w": {"kernel": jnp.ones((3, 4), jnp.bfloat16)}, "unread": jnp.ones(2)}
BATCH = {"x": jnp.ones((8, 3)), "y": jnp.ones((8,), jnp.int32)}
MUTABLE = {"mean": jnp.zeros(()), "spare": jnp.zeros(2)}


def test_leaves_are_named_and_the_batch_is_a_micro_batch():
    forward = traced(loss_with_all, PARAMS, BATCH, 4, MUTABLE)
    assert forward.params.names == ("unread", "w.kernel")
    assert forward.mutable.names == ("mean", "spare")
    assert forward.batch.names == ("x", "y")
    assert forward.metrics.names == ("largest", "loss", "rows")
    assert [v.aval.shape for v in forward.batch_vars] == [(4, 3), (4,)]
    assert [v.aval.shape for v in forward.param_vars] == [(2,), (3, 4)]
    assert forward.metric_dtypes == (jnp.float32, jnp.float32, jnp.int32)
    assert jnp.issubdtype(forward.key_var.aval.dtype, jax.dtypes.prng_key)
    assert forward.mutable_outs[1] is forward.mutable_vars[1]  # it stays as it is
    assert forward.loss_out is forward.metric_outs[1]


def test_a_tree_that_is_one_array_has_a_leaf_without_a_name():
    forward = traced(lambda params, batch, key: (jnp.mean(batch @ params), {}), jnp.ones((3, 4)), jnp.ones((8, 3)))
    assert forward.params.names == forward.batch.names == ("",)


def test_main_equations_depend_on_weights_and_data_or_on_mutable_state():
    forward = traced(loss_with_all, PARAMS, BATCH, 4, MUTABLE)
    names = main_names(forward)
    everything = [e.primitive.name for e in forward.jaxpr.eqns]
    assert names[0] in ("dot_general", "mul") and "dot_general" in names
    assert "convert_element_type" not in names and "convert_element_type" in everything  # the cast of the weights
    assert not {"select_n", "reduce_max", "random_bits"} & set(names)  # data alone: dropout and a metric
    assert {"select_n", "reduce_max", "random_bits"} & set(everything) == {"select_n", "reduce_max", "random_bits"}
    reading_mean = [i for i, e in enumerate(forward.jaxpr.eqns) if forward.mutable_vars[0] in e.invars]
    assert reading_mean and set(reading_mean) <= set(forward.main)


def test_what_nobody_reads_is_left_out():
    def loss(params, batch, key):
        dead = jnp.tanh(batch @ params) @ params.T
        return jnp.mean(batch @ params), {"unused": jnp.sum(jax.lax.stop_gradient(0.0)), "n": dead.shape[0]}

    forward = traced(loss, jnp.ones((3, 4)), jnp.ones((8, 3)))
    names = [e.primitive.name for e in forward.jaxpr.eqns]
    assert "tanh" not in names and names.count("dot_general") == 1


def test_what_prints_stays_though_nobody_reads_it():
    def loss(params, batch, key):
        x = batch @ params
        jax.debug.print("{x}", x=jnp.tanh(x).sum())
        return jnp.mean(x), {}

    assert "tanh" in main_names(traced(loss, jnp.ones((3, 4)), jnp.ones((8, 3))))
