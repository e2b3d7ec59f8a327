"""Every baseline trains as the unsharded step does, on eight devices; those of experts, tables and sequences among the
models (`tests/models/test_families.py`).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from baseline_programs import CPUX8, gpt, mlp

from autoshard import baselines
from autoshard.baselines import ALL, DataRule, Strategy, TensorRule

STEPS = 3
MESHES = ({"all": 8}, {"data": 2, "tensor": 4})
APPLICABLE = [s for s in ALL if s.spread is None and s.tensor is not TensorRule.SEQUENCE]
CASES = [(s, m) for s in APPLICABLE for m in MESHES if len(m) > 1 or not (s.data and s.tensor)]
GPT_CASES = [
    pytest.param("dropout", Strategy(DataRule.ZERO2, TensorRule.MEGATRON), MESHES[1], marks=pytest.mark.slow),
    pytest.param("scan", Strategy(DataRule.ZERO3, TensorRule.MEGATRON), MESHES[1], marks=pytest.mark.exhaustive),
    pytest.param("plain", Strategy(None, TensorRule.MEGATRON), MESHES[0], marks=pytest.mark.exhaustive),
    pytest.param("plain", Strategy(DataRule.ZERO3), MESHES[0], marks=pytest.mark.exhaustive),
]
"""In every run one: scanned layers, and both other strategies, are those of a family's (tests/models/test_families.py).
"""


def trained(run, step, state):
    """The state and the results after a few steps, as NumPy arrays."""
    batch = step.batch()
    results = []
    for _ in range(STEPS):
        state, result = run(state, batch)
        results.append(result)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves((state, results))]


@pytest.fixture(scope="module")
def references():
    """What the unsharded steps make, by program; kept so that each is compiled once."""
    made = {}

    def reference(kind):
        if kind not in made:
            step = mlp() if kind == "mlp" else gpt(kind, layers=2 if kind == "scan" else 1)
            subject = baselines.prepare_subject(step.fn, *step.shapes(), cluster=CPUX8, donate_argnums=0)
            state = jax.jit(step.init)(0)
            made[kind] = step, subject, state, trained(jax.jit(step.fn), step, state)
        return made[kind]

    return reference


def check(strategy, mesh, step, subject, state, expected):
    plan = baselines.plan_baseline(strategy, subject, mesh=mesh)
    state = jax.device_put(state, may_alias=False)  # the planned function takes its buffers over
    found = trained(plan.jit(step.fn), step, state)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(("strategy", "mesh"), CASES, ids=lambda x: x.name if isinstance(x, Strategy) else str(len(x)))
def test_mlp(references, strategy, mesh):
    check(strategy, mesh, *references("mlp"))


@pytest.mark.parametrize(("kind", "strategy", "mesh"), GPT_CASES, ids=lambda x: getattr(x, "name", str(x)))
def test_gpt(references, kind, strategy, mesh):
    check(strategy, mesh, *references(kind))
