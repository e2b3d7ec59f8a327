"""Slow devices in the published setting, simulated: ViT-1B and ViT-3B over a tensor axis of eight V100.

    python benchmarks/stragglers.py [--picture docs/images/stragglers.png]

The setting is that of Wang et al. 2024 (arXiv:2401.11469) and of the code that goes with it: images of 32 x 32 pixels
in patches of 4, float32, ViT-1B of 24 layers of width 2048 (batch 64) and ViT-3B of width 3072 (batch 32), Adam; one
rank eight times slower, another one in each epoch, or four ranks 8, 6, 4 and 2 times slower at once. No V100 was at
hand: times of products, of everything else and of collectives are those of a Megatron plan by autoshard's cost model,
with the figures of a data sheet. There are two notions of slow:

  products  As published, where a slow rank repeats its matrix products: only what works on units is slower. With the
            part r of a step in such work and a slowdown of s, leaving out a share gamma of the units gains
            (1 - r + s r) / (1 - r + max(1, s (1 - gamma)) r).
  device    All that the device computes is slower, as on a throttled or shared one.

Moving units costs their weights and optimizer state once, over one NVLink of the slow rank, in each epoch of 782
steps (50,000 images in batches of 64; 1,563 of 32). Writes results/stragglers.md.
"""

import argparse
import dataclasses
import math
import pathlib

import jax
import optax
from autoshard_models.train_step import build
from autoshard_models.vit import ViTConfig

from autoshard import PlanOptions, baselines
from autoshard.balance.control import Prices, decide, ideal_s
from autoshard.balance.options import Balance
from autoshard.balance.places import Room, even_placing
from autoshard.balance.policy import Disturbance, Policy, act
from autoshard.plans.apply import argument_shapes, check
from autoshard.plans.balanced import rooms_for, units_of
from autoshard.plans.movable_work import island_seconds, parts_of

ROOT = pathlib.Path(__file__).resolve().parent
RANKS = 8
IMAGES = 50_000
CAPACITY = 1.75
"""Places of a rank, as a multiple of an even share: what the healthy ones need where four of eight are slow is 1.59."""
SETTINGS = {
    "one rank, 8x": (8.0, 1, 1, 1, 1, 1, 1, 1),
    "four ranks, 8/6/4/2x": (8.0, 6.0, 4.0, 2.0, 1, 1, 1, 1),
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A published model: width, examples in a batch."""

    name: str
    width: int
    batch_size: int


MODELS = (Model("ViT-1B", 2048, 64), Model("ViT-3B", 3072, 32))


@dataclasses.dataclass(frozen=True)
class Step:
    """A healthy step of a model.

    Attributes:
      rooms: What can move. own_s: Seconds of work on each of `rooms`. other_s: Seconds of other work, on each device.
      comm_s: Seconds of collectives. link_bytes_per_s: Of one device to another.
    """

    rooms: tuple[Room, ...]
    own_s: tuple[float, ...]
    other_s: float
    comm_s: float
    link_bytes_per_s: float

    @property
    def step_s(self) -> float:
        """The whole step."""
        return sum(self.own_s) + self.other_s + self.comm_s

    @property
    def share(self) -> float:
        """The part r of the step that is work on units."""
        return sum(self.own_s) / self.step_s


def healthy(model: Model) -> Step:
    """The step of a Megatron plan over eight V100."""
    config = ViTConfig(
        image_size=32,
        patch_size=4,
        num_classes=10,
        num_layers=24,
        num_heads=16,
        embed_dim=model.width,
        hidden_dim=4 * model.width,
    )
    functions = build(config, optax.adamw(3e-3, weight_decay=0.3))
    state = jax.eval_shape(functions.init, 0)
    shape = (model.batch_size, 32, 32, 3)
    batch = {
        "images": jax.ShapeDtypeStruct(shape, "float32"),
        "labels": jax.ShapeDtypeStruct(shape[:1], "int32"),
    }
    plan = baselines.megatron(
        functions.step,
        state,
        batch,
        cluster=ROOT.parent / "configs" / "clusters" / "v100x8.yaml",
        mesh={"tensor": RANKS},
        donate_argnums=0,
        options=PlanOptions(mesh_limit_s=120),
    )
    graph = check(plan, functions.step, argument_shapes(plan)).graph
    dims = units_of(plan, graph)
    seconds = island_seconds(plan, graph, dims)
    rooms = tuple(wider(room) for room in rooms_for(dims, Balance("semi", absorbs=8.0, most_buckets=16), "gpu"))
    own_s = tuple(seconds[room.unit.index] for room in rooms)
    (axis,) = plan.logical_mesh.axes
    link = axis.levels[0].link.bandwidth_bytes_per_s
    return Step(rooms, own_s, plan.estimate.compute_s - sum(own_s), plan.estimate.exposed_s, link)


def wider(room: Room) -> Room:
    """A room with places for `CAPACITY` even shares, and buckets a sixteenth of an even share apart or one unit."""
    even = room.unit.size / room.unit.ways
    capacity = math.ceil(CAPACITY * even)
    apart = max(1, round(even / 16))
    return dataclasses.replace(
        room, capacity=capacity, buckets=tuple(sorted({0, int(even), capacity, *range(apart, capacity, apart)}))
    )


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A step with slow ranks: its seconds, units moved and left out of all, seconds of moving."""

    step_s: float
    moved: float = 0.0
    dropped: float = 0.0
    move_s: float = 0.0


def outcome(step: Step, slowness: tuple[float, ...], balance: Balance, whole_device: bool, epoch_steps: int) -> Outcome:
    """What the controller makes of it, for a disturbance of an epoch."""
    placed = [(room, even_placing(room)) for room in step.rooms]
    parts = parts_of(placed, step.own_s, step.other_s if whole_device else 0.0, step.link_bytes_per_s)
    action = act(Policy(balance), Disturbance(slowness, epoch_steps), parts)
    others_s = step.comm_s + (0.0 if whole_device else step.other_s)
    move_s = sum(d.moved * p.move_s for d, p in zip(action.decisions, parts, strict=True))
    return Outcome(
        action.after_s + others_s + move_s / epoch_steps, action.moved / action.of, action.dropped / action.of, move_s
    )


def published(step: Step, slowness: tuple[float, ...], gamma: float) -> float:
    """The step if all slow ranks leave out the same share, only products being slow: the emulation's model."""
    own_s = sum(step.own_s)
    slowest = max(w * (1 - gamma) if w > 1 else 1.0 for w in slowness)
    return step.comm_s + step.other_s + max(1.0, slowest) * own_s


def ideal(step: Step, slowness: tuple[float, ...], whole_device: bool) -> float:
    """The step if work on units could be divided at will, for nothing."""
    movable_s, total = sum(step.own_s), 0.0
    for room, own_s in zip(step.rooms, step.own_s, strict=True):
        fixed_s = own_s / movable_s * step.other_s if whole_device else 0.0
        total += ideal_s(slowness, room, Prices(own_s / (room.unit.size / RANKS), fixed_s))
    return total + step.comm_s + (0.0 if whole_device else step.other_s)


def formula(r: float, slowdown: float, gamma: float) -> float:
    """The gain that the emulation's model tells."""
    return (1 - r + slowdown * r) / (1 - r + max(1.0, slowdown * (1 - gamma)) * r)


def by_controller(r: float, slowdown: float, gamma: float) -> float:
    """The same gain from the controller's decision, for a step of 1 s with 1600 units on 8 ranks."""
    from autoshard.balance.units import UnitDimension

    unit = UnitDimension(0, "up", "tensor", RANKS, 1600, (), 1.0, 1.0, 1, ())
    room = Room(unit, 200, tuple(range(201)))
    prices = Prices(r / 200, most_dropped=gamma, may_move=False)
    slowness = (slowdown, *(1.0,) * (RANKS - 1))
    return (1 - r + slowdown * r) / (1 - r + decide(even_placing(room), slowness, room, prices).step_s)


def main() -> None:
    """Simulates all, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=pathlib.Path)
    arguments = parser.parse_args()
    lines = [
        "# Slow devices, simulated",
        "",
        "`python benchmarks/stragglers.py`",
        "",
        (__doc__ or "").partition("\n\n    ")[0],
    ]
    lines = lines[:4] + [
        "Predictions of the cost model for V100, not measurements; the assumptions are at the top of the script.",
        "",
    ]
    lines += [
        "The emulation's formula against the controller's own decision, a slowdown of 8 on one rank of eight:",
        "",
    ]
    lines += ["| r | gamma | formula | controller |", "| --- | --- | --- | --- |"]
    for r in (0.5, 0.6, 0.8):
        for gamma in (0.5, 0.875):
            lines.append(f"| {r:g} | {gamma:g} | {formula(r, 8, gamma):.2f} | {by_controller(r, 8, gamma):.2f} |")
    bars = {}
    for model in MODELS:
        step = healthy(model)
        epoch = IMAGES // model.batch_size
        lines += [
            "",
            f"## {model.name}, batch {model.batch_size}",
            "",
            f"A healthy step takes {step.step_s * 1e3:.1f} ms: {sum(step.own_s) * 1e3:.1f} ms on units (r = "
            f"{step.share:.2f}), {step.other_s * 1e3:.1f} ms other work, {step.comm_s * 1e3:.1f} ms collectives. "
            f"{len(step.rooms)} unit dimensions: {', '.join(sorted({f'{r.unit.size} units' for r in step.rooms}))}.",
            "",
            "| slow | notion | mode | step, ms | gain | of ideal gain | moved | left out | moving, ms an epoch |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for slow, slowness in SETTINGS.items():
            for notion in ("products", "device"):
                whole = notion == "device"
                rows = {"off": outcome(step, slowness, Balance("off"), whole, epoch)}
                if not whole:
                    rows["published resizing, gamma 1/2"] = Outcome(published(step, slowness, 0.5))
                for gamma in (0.5, 0.875):
                    rows[f"resize, gamma up to {gamma:g}"] = outcome(
                        step, slowness, Balance("resize", max_loss_share=gamma), whole, epoch
                    )
                rows["migrate"] = outcome(step, slowness, Balance("migrate"), whole, epoch)
                rows["semi, gamma up to 0.5"] = outcome(step, slowness, Balance("semi"), whole, epoch)
                rows["ideal division"] = Outcome(ideal(step, slowness, whole))
                off_s, ideal_step_s = rows["off"].step_s, rows["ideal division"].step_s
                for mode, one in rows.items():
                    part = (off_s / one.step_s - 1) / (off_s / ideal_step_s - 1)
                    cells = [slow, notion, mode, f"{one.step_s * 1e3:.1f}", f"{off_s / one.step_s:.2f}", f"{part:.0%}"]
                    cells += [f"{x:.1%}" if x else "-" for x in (one.moved, one.dropped)]
                    cells.append(f"{one.move_s * 1e3:.0f}" if one.move_s else "-")
                    lines.append("| " + " | ".join(cells) + " |")
                bars[model.name, slow, notion] = {m: off_s / o.step_s for m, o in rows.items()}
    text = "\n".join(lines) + "\n"
    (ROOT / "results" / "stragglers.md").write_text(text)
    print(text)
    if arguments.picture:
        draw(bars, arguments.picture)


def draw(bars: dict, path: pathlib.Path) -> None:
    """Gains by mode, for each setting in which the whole device is slow."""
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(10, 3.6), layout="constrained", facecolor="white")
    modes = ["resize, gamma up to 0.5", "migrate", "semi, gamma up to 0.5", "ideal division"]
    colours = ["#d1a13b", "#2e86ab", "#3a9d5d", "#bbbbbb"]
    own = [(k, v) for k, v in bars.items() if k[2] == "device"]
    axis = figure.subplots()
    for n, (_, gains) in enumerate(own):
        for k, (mode, colour) in enumerate(zip(modes, colours, strict=True)):
            bar = axis.bar(n + (k - 1.5) * 0.2, gains[mode], 0.18, color=colour, label=mode if n == 0 else None)
            axis.bar_label(bar, fmt="%.1f", fontsize=8, padding=2)
    axis.axhline(1, color="#555555", lw=0.8)
    axis.set_xticks(range(len(own)), [f"{model}\n{slow}" for (model, slow, _), _ in own])
    axis.set_ylabel("times as fast as doing nothing")
    axis.set_title("Eight V100 along a tensor axis, some of them slow (simulated)", fontsize=10)
    axis.legend(fontsize=8, frameon=False, ncols=4, loc="upper center")
    axis.set_ylim(0, axis.get_ylim()[1] * 1.12)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
