"""Recomputation and micro-batches chosen with the shardings: what they gain, and whether the compiler confirms it.

    python benchmarks/step_forms.py gains                            # every case; those that are there are kept
    python benchmarks/step_forms.py gains --config gpt_6.7b --device-gb 40 --again
    python benchmarks/step_forms.py offload                          # the same, where hosts can hold residuals
    python benchmarks/step_forms.py verify --model gpt,llama --gpu h100   # needs the extra `verify-gpu`, no GPU

`gains`: full-size configurations on 64 H100, of whose memory devices have 40 or 80 GB (a tenth is left free). The plan
with its form searched is compared with every strategy written by hand, each with the best of three policies for all
layers: nothing recomputed, products with weights kept (`dots_with_no_batch_dims_saveable`), and only inputs of layers
kept. A strategy counts with the bound that is proven for it, or with that of the plan, which is one of all forms and
strategies, if it is higher; and the plan with its step: gains are no less than what stands there. All of them are
predictions of one cost model. Batches are those of the
configurations, as published, but for the Llamas. Beside it stands the best strategy in the form that the plan chose,
which tells what the form gains, and what the shardings. `offload`: the plan with
`offload="activations"` on the same cluster with the hosts of a DGX H100, beside the strategies of `gains`, which keep
all on the devices. `verify`: the models of verify_matrix.py on eight H100 and eight A100, data=2, tensor=4, with 100,
60 and 40 % of the memory that the plan takes that keeps everything; compiled ahead of time in the orders that bound the
memory, which are the first that `Plan.jit` tries.

One JSON line a case goes to benchmarks/results/step-forms.jsonl, the tables to step-forms.md.
"""

import argparse
import dataclasses
import json
import math
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import yaml

import autoshard
from autoshard import PlanOptions, baselines
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, MemoryBudgetError, NotFasterError
from autoshard.plans.step_variant import StepVariant
from autoshard.remat.policy import Keep, uniform
from autoshard.remat.rewrite import layers_of
from autoshard.strategies.hand_written import POLICIES
from autoshard.train.config import load_config
from autoshard.train.planning import arguments
from autoshard.train.registry import train_functions
from autoshard.verify.targets import target_named

ROOT = pathlib.Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = ROOT / "configs"
GAINS = ("gpt_6.7b", "gpt_13b", "llama_8b", "encoder_large", "encoder_decoder_3b", "vit_h14", "llama_70b")
BATCHES = {"llama_8b": 128, "llama_70b": 128}  # of the configurations they would not fit by hand; a million tokens
DEVICE_GB = (40.0, 80.0)
GPUS = {"h100": "h100x8.yaml", "a100": "a100-80x8.yaml"}
SHARES = (1.0, 0.6, 0.4)
MESH = {"data": 2, "tensor": 4}
OPTIONS = PlanOptions(remat="search", micro_batches="search", cache=False, least_memory_s=0.0, relative_gap=0.01)
WRITTEN = dataclasses.replace(OPTIONS, remat="as_written", micro_batches="as_written")
BY_HAND = dataclasses.replace(WRITTEN, relative_gap=0.03)


@dataclasses.dataclass(frozen=True)
class Row:
    """One case.

    Attributes:
      part: `gains`, `offload` or `verify`. case: Its configuration or model, GPU and memory. form: What was chosen.
      step_s, gap: Of the plan; 0.0 where nothing fits.
      by_hand, by_hand_s: The best strategy with its policy, and what it takes at least; empty and 0.0 where none fits.
      in_form, in_form_s: The best strategy in the form of the plan, likewise.
      predicted_bytes, compiled_bytes: Of the peak. budget_bytes: What was allowed.
      reserved_bytes: What the compiled program needs, gaps between its buffers included.
      seconds: What it took; of `gains`, of processor time.
      reason: Why there is no plan.
    """

    part: str
    case: str
    form: str
    step_s: float = 0.0
    gap: float = 0.0
    by_hand: str = ""
    by_hand_s: float = 0.0
    in_form: str = ""
    in_form_s: float = 0.0
    predicted_bytes: float = 0.0
    compiled_bytes: float = 0.0
    budget_bytes: float = 0.0
    reserved_bytes: float = 0.0
    seconds: float = 0.0
    reason: str = ""

    def gain(self, other_s: float) -> float | None:
        """Over the plan, of what takes `other_s` at least; no plan takes less than the bound of this one."""
        return max(other_s, self.step_s * (1 - self.gap)) / self.step_s if self.step_s and other_s else None


def loaded(config: str, overrides: Sequence[str] = ()) -> tuple[Any, tuple[Any, ...]]:
    """The step of a configuration as a `TrainStep`, and its arguments by shape."""
    settings = load_config(CONFIGS / f"{config}.yaml", [*overrides, "plan.remat=search"])
    functions = train_functions(settings)
    return functions.step, arguments(settings, functions)


def gains(config: str, device_gb: float) -> Row:
    """The plan with its form searched beside the best strategy with its best policy, and in the form of the plan."""
    began = time.process_time()
    cluster = Cluster.from_file(CONFIGS / "clusters" / "h100x64.yaml")
    batch_size = BATCHES.get(config, load_config(CONFIGS / f"{config}.yaml", []).data.batch_size)
    step, args = loaded(config, [f"data.batch_size={batch_size}", "optimizer.num_micro_batches=1"])
    case, budget_bytes = f"{config}, {device_gb:g} GB, {batch_size} examples", 0.9 * device_gb * 1e9
    settings = {"cluster": cluster, "donate_argnums": 0, "memory_budget_bytes": budget_bytes}
    layers = layers_of(step, *args)
    best, settled = ByHand(), set()
    for policy in POLICIES:
        own = by_hand(policy.of(step, layers), args, settings, best.step_s, settled)
        best = ByHand(f"{own.name}, {policy}", own.step_s) if own.name else best
    row = Row("gains", case, "none", by_hand=best.name, by_hand_s=best.shown_s, budget_bytes=budget_bytes)
    try:
        plan = autoshard.plan(step, *args, options=OPTIONS, **settings)
    except MemoryBudgetError as error:
        return dataclasses.replace(row, reason=str(error)[:200], seconds=round(time.process_time() - began, 1))
    in_form = by_hand(plan.choice.variant.of(step), args, settings)
    return dataclasses.replace(
        row,
        form=f"{plan.choice}; {mesh_text(plan.axes)}",
        step_s=plan.estimate.step_s,
        gap=plan.certificate.gap,
        in_form=in_form.name,
        in_form_s=in_form.shown_s,
        predicted_bytes=plan.estimate.peak_bytes,
        seconds=round(time.process_time() - began, 1),
    )


@dataclasses.dataclass(frozen=True)
class ByHand:
    """The best strategy, and what it takes at least, as proven; no name where there is none."""

    name: str = ""
    step_s: float = math.inf

    @property
    def shown_s(self) -> float:
        """For a row."""
        return self.step_s if self.name else 0.0


def by_hand(
    step: Any,
    args: tuple[Any, ...],
    settings: dict[str, Any],
    to_beat_s: float = math.inf,
    settled: set[str] | None = None,
) -> ByHand:
    """The best of the strategies that fit.

    Args:
      step, args, settings: What is planned.
      to_beat_s: Strategies whose bound is no less are not sought to the end.
      settled: Names of those that fit or cannot be faster with less recomputed, and so need not be tried with more;
        those of this call are added.
    """
    settled = set() if settled is None else settled
    subject = baselines.prepare_subject(step, *args, **settings)
    best = ByHand(step_s=to_beat_s)
    for strategy in sorted(baselines.suited(subject), key=lambda s: s.name != "zero3"):  # mostly hard to beat
        if strategy.name in settled:
            continue
        try:
            plan = baselines.plan_baseline(strategy, subject, to_beat_s=best.step_s, options=BY_HAND, **settings)
        except NotFasterError:
            settled.add(strategy.name)
            continue
        except AutoshardError:
            continue  # it does not fit, or cannot be written down
        if plan.estimate.reserved_bytes <= settings["memory_budget_bytes"]:
            settled.add(strategy.name)
            if plan.certificate.bound < best.step_s:
                best = ByHand(strategy.name, plan.certificate.bound)
        print(f"  {strategy.name}: {plan.estimate.step_s:.4g} s, at least {plan.certificate.bound:.4g} s", flush=True)
    return best


def offloaded(config: str, device_gb: float, rows: Iterable[Row]) -> Row | None:
    """The plan that may keep residuals on hosts, beside the strategies of `gains`; None where those are not known."""
    known = next((r for r in rows if r.part == "gains" and r.case.startswith(f"{config}, {device_gb:g} GB")), None)
    if known is None:
        return None
    began = time.process_time()
    cluster = Cluster.from_file(CONFIGS / "clusters" / "h100x64.yaml").to_dict()
    cluster["version"] = 4
    cluster["groups"][0]["host"] = "DGX-H100"
    batch_size = known.case.split()[-2]
    step, args = loaded(config, [f"data.batch_size={batch_size}", "optimizer.num_micro_batches=1"])
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(cluster, file)
        file.flush()
        options = dataclasses.replace(OPTIONS, offload="activations")
        request = {"cluster": file.name, "donate_argnums": 0, "memory_budget_bytes": 0.9 * device_gb * 1e9}
        plan = autoshard.plan(step, *args, options=options, **request)
    held_bytes = sum(c.held_bytes for c in plan.estimate.host_copies)
    return dataclasses.replace(
        known,
        part="offload",
        form=f"{plan.choice}; {mesh_text(plan.axes)}; {held_bytes / 1e9:.1f} GB on the host",
        step_s=plan.estimate.step_s,
        gap=plan.certificate.gap,
        in_form="",
        in_form_s=0.0,
        predicted_bytes=plan.estimate.peak_bytes,
        seconds=round(time.process_time() - began, 1),
    )


def verified(name: str, gpu: str) -> Iterable[Row]:
    """Plans for a kind of GPU under less and less memory, compiled for it."""
    from verify_matrix import COMPILER_OPTIONS, MODELS, compile_step, gpu_devices

    model = MODELS[name]
    step, args = loaded(model.config, model.overrides)
    request = {"cluster": CONFIGS / "clusters" / GPUS[gpu], "mesh": MESH, "donate_argnums": 0}
    kept = autoshard.plan(
        StepVariant(uniform(layers_of(step, *args).runs, Keep.ALL)).of(step),
        *args,
        memory_budget_bytes=math.inf,
        options=WRITTEN,
        **request,
    )
    is_cut = len({leaf.shape[:1] for leaf in jax.tree.leaves(args[1])}) == 1  # a batch of graphs has no examples
    options = OPTIONS if is_cut else dataclasses.replace(OPTIONS, micro_batches="as_written")
    for share in SHARES:
        began = time.perf_counter()
        budget_bytes = share * (kept.estimate.reserved_bytes or kept.estimate.peak_bytes)
        case = f"{name}, {gpu}, {share:.0%}"
        try:
            plan = autoshard.plan(step, *args, memory_budget_bytes=budget_bytes, options=options, **request)
            compiled = compile_step(plan, step, args, gpu_devices(target_named(gpu), 8, 8), COMPILER_OPTIONS)
        except (AutoshardError, RuntimeError) as error:
            yield Row("verify", case, "none", budget_bytes=budget_bytes, reason=str(error)[:200])
            continue
        yield Row(
            "verify",
            case,
            str(plan.choice),
            step_s=plan.estimate.step_s,
            gap=plan.certificate.gap,
            predicted_bytes=plan.estimate.peak_bytes,
            compiled_bytes=compiled.memory.peak_bytes,
            budget_bytes=budget_bytes,
            reserved_bytes=compiled.memory.total_bytes,
            seconds=round(time.perf_counter() - began, 1),
        )


def mesh_text(axes: Sequence[tuple[str, int]]) -> str:
    """A mesh in one word for each axis."""
    return " x ".join(f"{name}={size}" for name, size in axes)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    lines = ["# The form of a step: recomputation and micro-batches\n"]
    for part in ("gains", "offload"):
        won = [r for r in rows if r.part == part]
        if not won:
            continue
        hosted = "With residuals on hosts where that is faster (`step_forms.py offload`), the same by hand:\n"
        lines += [
            hosted
            if part == "offload"
            else "`python benchmarks/step_forms.py gains`: 64 H100 with less or all of their memory, all meshes of up "
            "to two axes. Gain: the best strategy by hand, with its best policy for all layers, over the plan; behind "
            "it that of the best strategy in the plan's own form. Seconds of processor time for all of it.\n",
            "| case | by hand | its step, at least | plan | its step | gap | gain | in its form | gain | seconds |",
            "| --- " * 10 + "|",
        ]
        ratios = []
        for r in won:
            ratio, in_form = r.gain(r.by_hand_s), r.gain(r.in_form_s)
            ratios += [ratio] if ratio else []
            gain = f"{ratio:.3f}" if ratio else r.reason[:60] or "none fits by hand"
            cells = [r.case, r.by_hand or "none fits", f"{r.by_hand_s:.4g} s", r.form, f"{r.step_s:.4g} s"]
            cells += [f"{r.gap:.2%}", gain, r.in_form or "", f"{in_form:.3f}" if in_form else ""]
            lines.append("| " + " | ".join([*cells, f"{r.seconds:.0f}"]) + " |")
        if ratios:
            lines.append(f"\nGeometric mean of the gains: {statistics.geometric_mean(ratios):.3f}, of {len(ratios)}.\n")
    checked = sorted((r for r in rows if r.part == "verify"), key=lambda r: r.case.rpartition(", ")[0])
    if checked:
        lines += [
            "`python benchmarks/step_forms.py verify`: eight GPUs, data=2, tensor=4; GB of one device. Ratio: the "
            "predicted peak over the compiled. Reserved: what the compiled program needs, with gaps.\n",
            "| case | budget | form | step | predicted | compiled | ratio | reserved |",
            "| --- " * 8 + "|",
        ]
    for r in checked:
        ratio = f"{r.predicted_bytes / r.compiled_bytes:.3f}" if r.compiled_bytes else r.reason[:80]
        cells = [r.case, f"{r.budget_bytes / 1e9:.2f}", r.form, f"{r.step_s * 1e3:.2f} ms"]
        cells += [f"{r.predicted_bytes / 1e9:.2f}", f"{r.compiled_bytes / 1e9:.2f}", ratio]
        cells.append(f"{r.reserved_bytes / 1e9:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Runs what is asked for, and writes the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["gains", "offload", "verify", "table"])
    parser.add_argument("--config", default=",".join(GAINS))
    parser.add_argument("--device-gb", default=",".join(map(str, DEVICE_GB)))
    parser.add_argument("--again", action="store_true", help="of `gains`: also cases that are there")
    parser.add_argument("--model", help="of `verify`: only these of verify_matrix.py")
    parser.add_argument("--gpu", default=",".join(GPUS), help="of `verify`: what to plan and compile for")
    arguments_ = parser.parse_args()
    file = RESULTS / "step-forms.jsonl"
    rows = (
        {(r.part, r.case): r for r in (Row(**json.loads(l)) for l in file.read_text().splitlines())}
        if file.exists()
        else {}
    )

    def keep(row: Row) -> None:
        rows[row.part, row.case] = row
        print(row, flush=True)
        file.write_text("".join(json.dumps(dataclasses.asdict(r)) + "\n" for r in rows.values()))
        file.with_suffix(".md").write_text(table(list(rows.values())))

    if arguments_.part == "gains":
        for config in arguments_.config.split(","):
            for device_gb in map(float, arguments_.device_gb.split(",")):
                own = f"{config}, {device_gb:g} GB"
                if arguments_.again or not any(r.part == "gains" and r.case.startswith(own) for r in rows.values()):
                    keep(gains(config, device_gb))
    if arguments_.part == "offload":
        for config in arguments_.config.split(","):
            for device_gb in map(float, arguments_.device_gb.split(",")):
                if (row := offloaded(config, device_gb, list(rows.values()))) is not None:
                    keep(row)
    if arguments_.part == "verify":
        from verify_matrix import MODELS

        for gpu in arguments_.gpu.split(","):
            for name in arguments_.model.split(",") if arguments_.model else MODELS:
                for row in verified(name, gpu):
                    keep(row)
    file.with_suffix(".md").write_text(table(list(rows.values())))


if __name__ == "__main__":
    main()
