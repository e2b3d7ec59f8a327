"""An optimizer's update over parameters on several meshes gives what it gives on one device."""

import collections
import concurrent.futures
import queue

import jax
import numpy as np
import optax
import pytest
from autoshard_models.loss_scaling import LossScaling, all_finite, chosen, first_scale, next_scale
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError, PlanMismatchError
from autoshard.pipelines.run.mpmd_function import MpmdFunction, Replicated
from autoshard.pipelines.split.infer_submeshes import infer_submeshes
from autoshard.pipelines.split.mpmd import split_mpmd

SHAPES = {"a": (16, 8), "b": (8,), "c": (8, 16), "d": (16,), "e": (32, 48)}
SPECS = {"a": ("x",), "b": (), "c": ("x", "y"), "d": (("x", "y"),), "e": ()}
HOMES = {"a": 0, "b": 1, "c": 2, "d": 2, "e": 1}
"""Submesh 0 has 2 devices, submesh 1 has 1, and submesh 2 has 2 x 2."""
SCHEDULE = optax.join_schedules([optax.linear_schedule(0.0, 0.1, 2), optax.cosine_decay_schedule(0.1, 10)], [2])
SCALING = LossScaling(initial=4.0, growth_steps=2)


@pytest.fixture(scope="module")
def meshes() -> list[Mesh]:
    devices = np.asarray(jax.devices())
    return [Mesh(devices[1:3], "x"), Mesh(devices[3:4], "x"), Mesh(devices[4:].reshape(2, 2), ("x", "y"))]


def arrays(seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.normal(size=s) * scale, np.float32) for name, s in SHAPES.items()}


def plain(optimizer):
    """(gradients, (state, parameters)) -> (state, parameters)"""

    def update(gradients, kept):
        state, parameters = kept
        updates, state = optimizer.update(gradients, state, parameters)
        return state, optax.apply_updates(parameters, updates)

    return update, lambda parameters: (optimizer.init(parameters), parameters)


def scaled(optimizer):
    """`plain`, of gradients of a scaled loss; a step whose gradients are not finite is left out."""
    update, init = plain(optimizer)

    def scaled_update(gradients, kept):
        *inner, scale = kept
        gradients = jax.tree.map(lambda g: g / scale.scale, gradients)
        is_finite = all_finite(gradients)
        return *chosen(is_finite, update(gradients, inner), tuple(inner)), next_scale(SCALING, scale, is_finite)

    return scaled_update, lambda parameters: (*init(parameters), first_scale(SCALING))


class Placed:
    """An update split by submesh, with what is needed to run it on the meshes."""

    def __init__(self, update, kept, meshes, **options):
        gradients = arrays(0)
        self.closed = jax.make_jaxpr(update)(gradients, kept)
        leaves, self.tree = jax.tree.flatten(kept)
        owners, count = [HOMES[n] for n in SHAPES], len(leaves)
        first = next(k for k, x in enumerate(leaves) if any(x is p for p in kept[1].values()))
        known = [*owners, *[owners[k - first] if 0 <= k - first < 5 else None for k in range(count)]]
        successors = {k: k + 5 for k in range(count)}
        submeshes = infer_submeshes(self.closed, known, successors)
        self.program = split_mpmd(self.closed, submeshes, 3, {k: submeshes[i] for k, i in successors.items()})
        spec = {
            (HOMES[n], SHAPES[n]): SPECS[n] for n in SHAPES
        }  # moments are split like the parameter, other state is whole
        self.shardings = [
            None if p is None else NamedSharding(meshes[p], PartitionSpec(*spec.get((p, v.aval.shape), ())))
            for p, v in zip(submeshes, self.closed.jaxpr.invars, strict=True)
        ]
        self.run = MpmdFunction(
            self.program, meshes, self.shardings, self.shardings[5:], donated=range(5 + count), **options
        )

    def put(self, tree, start: int = 0) -> list:
        """Leaves as inputs from number `start` on."""
        given = zip(jax.tree.leaves(tree), self.shardings[start:], strict=False)
        return [x if s is None else jax.device_put(x, s) for x, s in given]


def assert_near(actual, expected, rtol):
    for x, want in zip(actual, jax.tree.leaves(expected), strict=True):
        for one in x.arrays if isinstance(x, Replicated) else [x]:
            assert one.dtype == want.dtype
            np.testing.assert_allclose(np.asarray(one), np.asarray(want), rtol=rtol, atol=rtol / 10)


GROUPS = {"a": "adam", "b": "sgd", "c": "sgd", "d": "adam", "e": "adam"}
OPTIMIZERS = {
    "adamw": (optax.adamw(1e-2), 1, 0),
    "adafactor": (optax.adafactor(1e-2, min_dim_size_to_factor=4), 1, 0),
    "sgd": (optax.chain(optax.add_decayed_weights(0.1), optax.sgd(SCHEDULE, momentum=0.9), optax.ema(0.9)), 1, 0),
    # The sum is ((((0 + a) + b) + c) + d) + e: 0 + a from submesh 0, b and e from 1, c and d from 2; 4 bytes to 2 each.
    "clipped": (optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(SCHEDULE)), 2, 5 * 4 * 2),
    "clipped at last": (optax.chain(optax.scale_by_adam(), optax.clip_by_global_norm(0.5), optax.scale(-0.1)), 2, 40),
    "groups": (optax.multi_transform({"adam": optax.adam(1e-2), "sgd": optax.sgd(0.1)}, GROUPS), 1, 0),
    # A flag of each leaf, 1 byte to 2 others; then, inside the conditional, the norm.
    "finite": (optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 2), 3, 10 + 40),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_are_those_of_one_device(name, meshes):
    optimizer, levels, exchanged_bytes = OPTIMIZERS[name]
    update, init = plain(optimizer)
    kept = init(arrays(1))
    placed = Placed(update, kept, meshes)
    assert (len(placed.program.levels), placed.program.exchanged_bytes) == (levels, exchanged_bytes)
    whole, state = jax.jit(update), placed.put(kept, 5)
    for step in range(3):
        gradients = arrays(step + 2)
        if name == "finite" and step == 1:
            gradients["d"][3] = np.inf
        state = placed.run(*placed.put(gradients), *state)
        kept = whole(gradients, kept)
        assert_near(state, kept, 1e-6)
    for x, sharding in zip(state, placed.shardings[5:], strict=True):
        assert isinstance(x, Replicated) if sharding is None else x.sharding == sharding


def test_a_step_with_gradients_that_are_not_finite_is_left_out_on_every_submesh(meshes):
    update, init = scaled(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(SCHEDULE, momentum=0.9)))
    kept = init(arrays(1))
    placed = Placed(update, kept, meshes)
    assert len(placed.program.levels) == 2
    assert placed.program.exchanged_bytes == 5 * 2 * (4 + 1)  # a share of the norm and a flag of each leaf
    state, before = placed.put(kept, 5), kept
    for bad in (None, "b", None):
        gradients = arrays(3, 4.0)
        if bad:
            gradients[bad][0] = np.nan
        state = placed.run(*placed.put(gradients), *state)
        before, kept = kept, jax.jit(update)(gradients, kept)
        assert_near(state, kept, 1e-6)
        if bad:
            assert_near(jax.tree.leaves(kept)[:-2], before[:2], 0)


@pytest.fixture(scope="module")
def clipped(meshes) -> tuple[Placed, list]:
    """An update of two levels, and inputs for it."""
    update, init = plain(OPTIMIZERS["clipped"][0])
    kept = init(arrays(1))
    placed = Placed(update, kept, meshes)
    return placed, [*placed.put(arrays(2)), *placed.put(kept, 5)]


def test_donated_inputs_are_reused_or_freed_after_their_last_use(clipped, meshes):
    placed, inputs = clipped
    copy = lambda: [
        x if s is None else jax.device_put(np.asarray(x), s) for x, s in zip(inputs, placed.shardings, strict=True)
    ]
    given = copy()
    results = placed.run(*given)
    assert all(x.is_deleted() for x, s in zip(given, placed.shardings, strict=True) if s is not None)
    assert not any(x.is_deleted() for one in results for x in (one.arrays if isinstance(one, Replicated) else [one]))
    first, second = ([one for one in placed.run.programs if one.level == n] for n in (0, 1))
    assert [len(one.donated) for one in first] == [0, 0, 0]  # gradients are read again
    assert [len(one.donated) for one in second] == [3, 6, 6]  # for each leaf, two moments and the parameter
    kept = MpmdFunction(placed.program, meshes, placed.shardings)
    again = kept(*(given := copy()))
    assert not any(x.is_deleted() for x in given if isinstance(x, jax.Array))
    assert_near(again, [x.arrays[0] if isinstance(x, Replicated) else x for x in results], 0)


def test_what_a_submesh_compiles_depends_on_no_other_submesh(clipped, meshes):
    placed, _ = clipped
    others = [meshes[0], Mesh(jax.devices()[:1], "x"), Mesh(np.asarray(jax.devices()[3:7]).reshape(2, 2), ("x", "y"))]
    at = [None if s is None else NamedSharding(others[meshes.index(s.mesh)], s.spec) for s in placed.shardings]
    moved = MpmdFunction(placed.program, others, at, at[5:], donated=range(len(at)), local_submeshes=[0])
    mine = [one for one in placed.run.programs if one.submesh == 0]
    assert len(mine) == len(moved.programs) == 2
    for one, other in zip(mine, moved.programs, strict=True):
        assert one.lowered.as_text() == other.lowered.as_text()
        devices = set().union(*(x.device_set for x in one.compiled.output_shardings))
        assert devices == set(meshes[0].devices.flat)


def test_processes_that_have_some_of_the_submeshes_agree(clipped, meshes):
    """Two threads take the parts of two processes: each has some submeshes, and sends to the other through queues."""
    placed, inputs = clipped
    wires = collections.defaultdict(queue.Queue)

    def process(submeshes):
        numbers = []

        def send(array, target, number):
            numbers.append(number)
            is_for_me = meshes.index(target.mesh) in submeshes
            if not isinstance(array, jax.Array):
                return jax.device_put(wires[number].get(timeout=60), target) if is_for_me else array
            if not is_for_me:
                wires[number].put(np.asarray(array))
            return jax.device_put(array, target) if is_for_me else array

        options = {"send": send, "local_submeshes": submeshes}
        run = MpmdFunction(placed.program, meshes, placed.shardings, placed.shardings[5:], **options)
        given = [x if isinstance(x, Replicated) or h is None or h in submeshes else None for x, h in named]
        return run(*given), numbers

    named = list(zip(inputs, placed.program.inputs, strict=True))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        (left, numbers), (right, others) = pool.map(process, [(0, 2), (1,)])
    assert numbers == others == list(range(6))  # one message from each of three submeshes to two others
    whole = MpmdFunction(placed.program, meshes, placed.shardings, placed.shardings[5:])(*inputs)
    for one, other, want, submesh in zip(left, right, whole, placed.program.output_submeshes, strict=True):
        if submesh is None:
            one, other, want = (x.arrays[1] for x in (one, other, want))
            submesh = 1
        has, lacks = (other, one) if submesh == 1 else (one, other)
        assert isinstance(lacks, jax.ShapeDtypeStruct) and (lacks.shape, lacks.sharding) == (want.shape, want.sharding)
        np.testing.assert_array_equal(has, want)


def test_what_does_not_fit_is_refused(clipped, meshes):
    placed, inputs = clipped
    with pytest.raises(MeshError, match="3 submeshes, but 2 meshes"):
        MpmdFunction(placed.program, meshes[:2], placed.shardings)
    with pytest.raises(PlanMismatchError, match="input 0 is on submesh 0"):
        MpmdFunction(placed.program, meshes, [placed.shardings[1], *placed.shardings[1:]])
    with pytest.raises(PlanMismatchError, match="flat inputs, but 1"):
        placed.run(inputs[0])
