"""What leaving units out costs in accuracy: a ViT on handwritten digits, and a byte-level GPT.

    python benchmarks/stragglers_accuracy.py [--seeds 3] [--models vit,gpt] [--picture straggler_accuracy.png]
    python benchmarks/stragglers_accuracy.py --selections [--seeds 6]

Eight ranks share hidden units and heads; one of them is slow, another one in each epoch (in turn, as in Wang et al.
2024, arXiv:2401.11469), or always the first (the harder case, in which the same units are at stake). It leaves out
gamma of its units. Which ones is chosen anew 4 times an epoch: at random, by how much their weights changed lately, or
by a running mean of their gradients. Held-out accuracy (ViT) and loss (GPT) are compared with the balanced run of the
same seed: same initial weights, same batches. Writes results/straggler-accuracy.md and .json.

With `--selections`, more ways to choose are tried, with half of the units left out and another rank slow in each epoch:
after how many times that a unit was left out it comes first; sampling with probabilities in proportion to the score
(the k largest of log score plus Gumbel noise; Kool et al. 2019, arXiv:1903.06059) instead of the largest scores; what
stays counting for what is left out (1 / (1 - gamma)); and a running mean of |sum of weight times gradient| over what a
unit adds, by how much the loss would change to first order without it (Molchanov et al. 2017, arXiv:1611.06440).
Differences are taken to choice at random with the same seed. Writes results/straggler-selection.md and .json; what the
latter has already is not computed again.

This computes the meaning of resizing by explicit masks on one device: a unit left out adds nothing, its gradients are
exactly zero, and the optimizer leaves its weights and moments alone. `tests/balance` shows that the sharded step with
fewer units computes the same. Evaluation uses all units. Moving units changes nothing, so that the balanced run stands
for it.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import statistics
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from autoshard_models.zoo import FAMILIES

from autoshard.balance.places import Placing
from autoshard.balance.selection import Priority, ordered
from autoshard.train.data.images import digits
from autoshard.train.data.text import python_sources

ROOT = pathlib.Path(__file__).resolve().parent
RANKS, REFRESHES = 8, 4
BATCH_SIZE, SMOOTHING = 64, 0.9
ADDED = ("down.kernel", "output.kernel")
"""Parameters by which a layer adds up what units make."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A model, its data and how long it is trained.

    Attributes:
      name: Family. overrides: Of its tiny preset. epochs: In number. steps: Of an epoch, a multiple of `REFRESHES`.
      learning_rate: Its peak.
    """

    name: str
    overrides: dict
    epochs: int
    steps: int
    learning_rate: float


TASKS = {
    "vit": Task("vit", {"num_heads": 16, "hidden_dim": 128, "num_layers": 2}, 32, 20, 4e-3),
    "gpt": Task("gpt", {"num_heads": 16, "embed_dim": 64, "num_layers": 2, "context_length": 32}, 16, 20, 4e-3),
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is left out.

    Attributes:
      gamma: The share of the slow rank's units. priority: How they are chosen; None for the balanced run.
      where: Which rank is slow: in turn or always.
      longest_wait: A unit that was left out so many times comes first.
      is_sampled: Whether scores are probabilities. unbiased: Whether what stays counts for what is left out.
    """

    gamma: float
    priority: Priority | Literal["saliency"] | None
    where: str
    longest_wait: int = 8
    is_sampled: bool = False
    unbiased: bool = False

    @property
    def label(self) -> str:
        """Its name in results."""
        more = [f"first after {self.longest_wait}"] if self.longest_wait != 8 else []
        more += ["sampled"] * self.is_sampled + ["unbiased"] * self.unbiased
        return "|".join([self.where, str(self.gamma), ", ".join([self.priority or "balanced", *more])])


def selections() -> list[Setting]:
    """The balanced run, choice at random, and ways to choose by scores."""
    random, change, gradient = (Setting(0.5, p, "in turn") for p in ("random", "change", "gradient"))
    soon = [dataclasses.replace(one, longest_wait=2) for one in (random, change, gradient)]
    sampled = [dataclasses.replace(one, is_sampled=True) for one in (change, gradient)]
    saliency = Setting(0.5, "saliency", "in turn")
    others = [dataclasses.replace(random, unbiased=True), saliency, dataclasses.replace(saliency, is_sampled=True)]
    return [Setting(0.0, None, "nowhere"), random, change, gradient, *soon, *sampled, *others]


def settings() -> list[Setting]:
    """The balanced run, and all others."""
    found = [Setting(0.0, None, "nowhere")]
    for where in ("in turn", "always"):
        shares = (0.25, 0.5) if where == "in turn" else (0.5,)
        found += [Setting(g, p, where) for g in shares for p in ("random", "change", "gradient")]
    return found


class Data:
    """Batches for training by number, and what is held out."""

    def __init__(self, task: Task, config, seed: int):
        rng = np.random.default_rng(seed)
        if task.name == "vit":
            data, held = digits(), 397
            images = (data.images / 8 - 1)[..., None]
            order = np.concatenate([held + rng.permutation(len(images) - held) for _ in range(task.epochs)])
            self._batch = lambda own: {"images": images[own], "labels": data.labels[own]}
            self._order = order
            self.held_out = self._batch(np.arange(held))
        else:
            corpus, length = python_sources()[:2_000_000], config.context_length
            held, last = 200_000, len(corpus) - length - 1
            piece = lambda first: corpus[first[:, None] + np.arange(length + 1)].astype(np.int32)
            self._batch = lambda own: {"inputs": piece(own)[:, :-1], "targets": piece(own)[:, 1:]}
            self._order = rng.integers(held, last, task.epochs * task.steps * BATCH_SIZE)
            self.held_out = self._batch(np.arange(0, held - length - 1, 1000))

    def part(self, first: int, steps: int):
        """Batches of consecutive steps, stacked."""
        own = self._order[first * BATCH_SIZE : (first + steps) * BATCH_SIZE]
        return jax.tree.map(lambda x: x.reshape(steps, BATCH_SIZE, *x.shape[1:]), self._batch(own))


def unit_dim(path: str) -> tuple[str, int] | None:
    """The kind of units that a parameter is made of, and the dimension; by the names that models/layers.py gives."""
    for part, kind, dim in (
        ("mlp.up.kernel", "hidden", 1),
        ("mlp.up.bias", "hidden", 0),
        ("mlp.down.kernel", "hidden", 0),
        ("query.kernel", "heads", 1),
        ("key.kernel", "heads", 1),
        ("value.kernel", "heads", 1),
        ("query.bias", "heads", 0),
        ("key.bias", "heads", 0),
        ("value.bias", "heads", 0),
        ("output.kernel", "heads", 0),
    ):
        if path.endswith(part):
            return kind, dim
    return None


def with_units(function, masks, params, *trees):
    """`function(mask of the leaf or None, leaf, ...)` of every parameter."""

    def of(path, leaf, *others):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found = unit_dim(name)
        if found is None:
            return function(None, name, leaf, *others)
        kind, dim = found
        mask = masks[kind][int(name.split(".")[1])]
        return function(mask.reshape((-1,) + (1,) * (leaf.ndim - dim - 1)), name, leaf, *others)

    return jax.tree_util.tree_map_with_path(of, params, *trees)


class Training:
    """A model that trains with masks."""

    def __init__(self, task: Task, has_saliency: bool = False):
        self._has_saliency = has_saliency
        preset = FAMILIES[task.name].presets["tiny"]
        self.task, self.config = task, dataclasses.replace(preset, **task.overrides)
        self.objective = FAMILIES[task.name].objective(self.config)
        total = task.epochs * task.steps
        rate = optax.warmup_cosine_decay_schedule(0.0, task.learning_rate, task.steps, total, task.learning_rate / 10)
        self.rate = rate
        self.moments = optax.scale_by_adam(0.9, 0.95)
        self.run = jax.jit(jax.vmap(self._run))
        self.evaluate = jax.jit(jax.vmap(self._evaluate, in_axes=(0, None)))
        self.sums = jax.jit(jax.vmap(lambda a, b: unit_sums(jax.tree.map(jnp.subtract, a, b), self.config)))

    def _loss(self, params, masks, batch):
        """Of the units that are computed: what the others add is multiplied by 0, where a layer brings units back."""
        gone = lambda mask, name, x: x if mask is None or not name.endswith(ADDED) else x * mask
        return self.objective.loss(with_units(gone, masks, params), {}, batch, None)[0]

    def _run(self, state, masks, batches):
        """Steps on stacked batches; returns the state and the sums of the gradients' sizes for each unit."""

        def step(state, batch):
            params, moments, mean, count = state
            gradients = jax.grad(self._loss)(params, masks, batch)
            updates, (new,) = optax.chain(self.moments).update(gradients, (moments,), params)
            rate = self.rate(count)
            update = lambda mask, name, p, u: self._kept(mask, p - rate * (u + 0.1 * p), p)
            kept = lambda mask, name, old, fresh: self._kept(mask, fresh, old)
            moments = new._replace(
                mu=with_units(kept, masks, moments.mu, new.mu), nu=with_units(kept, masks, moments.nu, new.nu)
            )
            size = self._size(params, gradients)
            mean = jax.tree.map(
                lambda m, old, fresh: jnp.where(m > 0, SMOOTHING * old + (1 - SMOOTHING) * fresh, old),
                masks,
                mean,
                size,
            )
            return (with_units(update, masks, params, updates), moments, mean, count + 1), None

        return jax.lax.scan(step, state, batches)[0]

    def _size(self, params, gradients):
        """What the running mean of a unit is of: the size of its gradients, or what it does to the loss."""
        if not self._has_saliency:
            return unit_sums(gradients, self.config)
        is_added = lambda path: jax.tree_util.keystr(path, simple=True, separator=".").endswith(ADDED)
        added = jax.tree_util.tree_map_with_path(lambda path, p, g: p * g * is_added(path), params, gradients)
        return jax.tree.map(jnp.abs, unit_sums(added, self.config, lambda x: x))

    @staticmethod
    def _kept(mask, new, old):
        return new if mask is None else jnp.where(mask > 0, new, old)

    def _evaluate(self, params, batch):
        loss = self.objective.loss(params, {}, batch, None)[0]
        if self.task.name != "vit":
            return loss, loss
        from autoshard_models.vit import ViT
        from flax import nnx

        graph = nnx.graphdef(nnx.eval_shape(lambda: ViT(self.config, rngs=nnx.Rngs(params=0))))
        logits = nnx.merge(graph, params, {})(batch["images"])
        return loss, jnp.mean(jnp.argmax(logits, -1) == batch["labels"])

    def curves(self, setting: Setting, seeds: int) -> list[list[tuple[int, float, float]]]:
        """For each seed the (epoch, held-out loss, held-out accuracy or loss) of a run; seeds train side by side."""
        task, layers = self.task, self.config.num_layers
        data = [Data(task, self.config, seed) for seed in range(seeds)]
        params = jax.vmap(lambda key: self.objective.init(key)[0])(jax.vmap(jax.random.key)(jnp.arange(seeds)))
        sizes = {kind: x.shape[-1] for kind, x in jax.eval_shape(self.sums, params, params).items()}
        whole = {kind: jnp.ones((seeds, layers, n)) for kind, n in sizes.items()}
        count = jnp.zeros(seeds, jnp.int32)
        state = (params, jax.vmap(self.moments.init)(params), jax.tree.map(jnp.zeros_like, whole), count)
        waited = jax.tree.map(lambda x: np.zeros(x.shape, int), whole)
        changed = jax.tree.map(lambda x: np.full(x.shape, np.inf), whole)
        curves, each = [[] for _ in range(seeds)], task.steps // REFRESHES
        for part in range(task.epochs * REFRESHES):
            epoch = part // REFRESHES
            slow = epoch % RANKS if setting.where == "in turn" else 0
            masks = whole
            if setting.priority:
                scores = changed if setting.priority == "change" else jax.tree.map(np.asarray, state[2])
                masks = {kind: np.ones(x.shape, np.float32) for kind, x in whole.items()}
                for kind, seed, layer in itertools.product(sizes, range(seeds), range(layers)):
                    own = scores[kind][seed, layer], waited[kind][seed, layer]
                    masks[kind][seed, layer] = self._mask(setting, slow, *own, 1000 * seed + part)
                waited = jax.tree.map(lambda m, w: np.where(m > 0, 0, w + 1), masks, waited)
            before = state[0]
            batches = [one.part(part * each, each) for one in data]
            state = self.run(state, masks, jax.tree.map(lambda *x: np.stack(x), *batches))
            moved = jax.tree.map(np.asarray, self.sums(state[0], before))
            changed = jax.tree.map(lambda m, new, old: np.where(np.asarray(m) > 0, new, old), masks, moved, changed)
            if part % REFRESHES == REFRESHES - 1:
                losses, scores = self.evaluate(state[0], data[0].held_out)
                for curve, loss, score in zip(curves, losses, scores, strict=True):
                    curve.append((epoch + 1, float(loss), float(score)))
        return curves

    @staticmethod
    def _mask(setting: Setting, slow: int, scores, waited, seed: int) -> np.ndarray:
        """1 for the units that are computed."""
        each = len(scores) // RANKS
        units = tuple(tuple(range(r * each, (r + 1) * each)) for r in range(RANKS))
        active = tuple(round(each * (1 - setting.gamma)) if r == slow else each for r in range(RANKS))
        if setting.is_sampled:
            own = list(units[slow])
            known = np.where(np.isfinite(scores) & (scores > 0), scores, np.nan)[own]
            usual = 1.0 if np.isnan(known).all() else np.nanmean(known)
            scores = np.zeros(len(scores))
            scores[own] = np.log(np.nan_to_num(known, nan=usual)) + np.random.default_rng(seed).gumbel(size=each)
        priority = "gradient" if setting.priority == "saliency" else setting.priority
        placing = ordered(Placing(units, active), priority, scores, waited, seed, setting.longest_wait)
        mask = np.zeros(len(scores), np.float32)
        for own, count in zip(placing.units, placing.active, strict=True):
            mask[list(own[:count])] = each / count if setting.unbiased else 1
        return mask


def unit_sums(tree, config, of=jnp.abs) -> dict:
    """For each kind, (layers, units): the sums of absolute values, or of others, over all parameters of a unit."""
    sums: dict = {"hidden": [0.0] * config.num_layers, "heads": [0.0] * config.num_layers}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        found = unit_dim(name)
        if found is not None:
            kind, dim = found
            layer = int(name.split(".")[1])
            others = tuple(d for d in range(leaf.ndim) if d != dim)
            sums[kind][layer] = sums[kind][layer] + jnp.sum(of(leaf), axis=others)
    return {kind: jnp.stack(rows) for kind, rows in sums.items()}


def main() -> None:
    """Trains all, and writes what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", default="vit,gpt")
    parser.add_argument("--picture", type=pathlib.Path)
    parser.add_argument("--from-results", action="store_true", help="draw and tabulate what was computed before")
    parser.add_argument("--selections", action="store_true", help="try more ways to choose")
    arguments = parser.parse_args()
    if arguments.selections:
        try_selections(arguments.models.split(","), arguments.seeds)
        return
    path = ROOT / "results" / "straggler-accuracy.json"
    curves = json.loads(path.read_text()) if path.exists() and arguments.from_results else {}
    if not arguments.from_results:
        for name in arguments.models.split(","):
            training = Training(TASKS[name])
            for setting in settings():
                label = f"{name}|{setting.label}"
                curves[label] = training.curves(setting, arguments.seeds)
                print(label, [f"{c[-1][2]:.4f}" for c in curves[label]], flush=True)
                path.write_text(json.dumps(curves) + "\n")
    (ROOT / "results" / "straggler-accuracy.md").write_text(report(curves))
    print(report(curves))
    if arguments.picture:
        draw(curves, arguments.picture)


def try_selections(models: list[str], seeds: int) -> None:
    """Trains with all ways to choose, and writes the table."""
    path = ROOT / "results" / "straggler-selection.json"
    curves = json.loads(path.read_text()) if path.exists() else {}
    for name in models:
        trainings = [Training(TASKS[name], has_saliency) for has_saliency in (False, True)]
        for setting in selections():
            label = f"{name}|{setting.label}"
            if label not in curves:
                curves[label] = trainings[setting.priority == "saliency"].curves(setting, seeds)
                path.write_text(json.dumps(curves) + "\n")
            print(label, [f"{final(c)[0]:.4f}" for c in curves[label]], flush=True)
    path.with_suffix(".md").write_text(selection_report(curves))


def selection_report(curves: dict) -> str:
    """The table: held-out loss to choice at random, by seeds."""
    lines = [
        "# Ways to choose the units that stay",
        "",
        "`python benchmarks/stragglers_accuracy.py --selections --seeds 6`: held-out loss (mean over the last three",
        "epochs) less that of the run of the same seed whose units were chosen at random; another rank of eight slow",
        "in each epoch, half of its units left out, chosen anew 4 times an epoch. Means over seeds, with their",
        "standard errors; below zero is better than at random.",
        "",
        "| model | seeds | what stays | held-out loss | to random | standard error |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, runs in curves.items():
        name, _, _, way = label.split("|")
        base = curves[f"{name}|in turn|0.5|random"]
        gaps = [final(a)[0] - final(b)[0] for a, b in zip(runs, base, strict=True)]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5
        loss = statistics.mean(final(c)[0] for c in runs)
        lines.append(f"| {name} | {len(runs)} | {way} | {loss:.4f} | {statistics.mean(gaps):+.4f} | {error:.4f} |")
    return "\n".join(lines) + "\n"


def final(curve) -> tuple[float, float]:
    """Loss and score at the end: means over the last three epochs, which single images move less."""
    return tuple(statistics.mean(point[k] for point in curve[-3:]) for k in (1, 2))


def report(curves: dict) -> str:
    """The tables."""
    lines = [
        "# Accuracy with units left out",
        "",
        "`python benchmarks/stragglers_accuracy.py`: held-out scores, means over the last three epochs and over seeds;",
        "in brackets the least and the largest difference to the balanced run of the same seed. A unit that was left",
        "out eight times one after another comes first; straggler-selection.md has other rotations.",
    ]
    for name in dict.fromkeys(label.split("|")[0] for label in curves):
        own = {k: v for k, v in curves.items() if k.startswith(f"{name}|")}
        base = own[f"{name}|nowhere|0.0|balanced"]
        is_vit = name == "vit"
        score = "accuracy" if is_vit else "loss"
        lines += ["", f"{TASKS[name]}, {len(base)} seeds.", ""]
        lines += [f"| slow rank | gamma | what stays | {score} | to balanced |" + " loss to balanced |" * is_vit]
        lines += ["| --- " * (5 + is_vit) + "|"]
        for label, runs in own.items():
            _, where, gamma, priority = label.split("|")
            ends, bases = [final(c) for c in runs], [final(c) for c in base]
            gaps = [a[1] - b[1] for a, b in zip(ends, bases, strict=True)]
            scale, unit = (100, " points") if is_vit else (1, "")
            mean = statistics.mean(e[1] for e in ends)
            cells = [where, gamma, priority, f"{mean:.2%}" if is_vit else f"{mean:.4f}"]
            digits_ = 2 if is_vit else 4
            told = lambda g, s=scale, n=digits_: f"{g * s:+.{n}f}"
            cells.append(f"{told(statistics.mean(gaps))}{unit} ({told(min(gaps))} to {told(max(gaps))})")
            if is_vit:
                losses = [a[0] - b[0] for a, b in zip(ends, bases, strict=True)]
                cells.append(f"{statistics.mean(losses):+.4f}")
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def draw(curves: dict, path: pathlib.Path) -> None:
    """Held-out loss over epochs relative to the balanced run, for gamma 1/2."""
    import matplotlib.figure

    names = list(dict.fromkeys(label.split("|")[0] for label in curves))
    figure = matplotlib.figure.Figure(figsize=(11, 3.6 * len(names)), layout="constrained", facecolor="white")
    axes = figure.subplots(len(names), 2, squeeze=False)
    colours = {"balanced": "#222222", "random": "#d1495b", "change": "#2e86ab", "gradient": "#3a9d5d"}
    told = {"change": "largest change of weights", "gradient": "largest gradients", "random": "at random"}
    for row, name in enumerate(names):
        base = np.asarray(curves[f"{name}|nowhere|0.0|balanced"])
        for column, where in enumerate(("in turn", "always")):
            axis = axes[row, column]
            for label, runs in curves.items():
                own, place, gamma, priority = label.split("|")
                if own != name or place not in (where, "nowhere") or gamma == "0.25":
                    continue
                values = np.asarray(runs)
                mean = values[:, :, 1].mean(axis=0)
                axis.plot(
                    values[0, :, 0],
                    mean,
                    color=colours[priority],
                    lw=1.6,
                    label="balanced, or units moved" if priority == "balanced" else f"left out: kept {told[priority]}",
                )
                axis.fill_between(
                    values[0, :, 0],
                    values[:, :, 1].min(axis=0),
                    values[:, :, 1].max(axis=0),
                    color=colours[priority],
                    alpha=0.12,
                    lw=0,
                )
            low = base[:, :, 1].min()
            axis.set_ylim(low * (0.9 if name == "vit" else 0.97), float(base[:, 3, 1].max()) * 1.1)
            axis.set_xlabel("epoch")
            axis.set_ylabel("held-out loss, nats")
            model = {"vit": "ViT on 1,797 digits", "gpt": "byte-level GPT"}[name]
            which = {"in turn": "another rank of 8 slow in each epoch", "always": "always the same rank slow"}[where]
            axis.set_title(f"{model}: {which}, half of its units left out", fontsize=9.5)
            axis.grid(alpha=0.25)
            if row == 0:
                axis.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
