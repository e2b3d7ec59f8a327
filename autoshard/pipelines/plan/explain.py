"""A plan in stages as text for a terminal: what runs where, what a step is made of, what else was considered."""

import collections
import math
from collections.abc import Sequence

from rich.console import Console

from autoshard.pipelines.plan.equal_pipelines import EqualPipelines, crossing, equal_pipelines, weights_of
from autoshard.pipelines.plan.pipeline_plan import PipelinePlan
from autoshard.pipelines.schedule.timeline import UPDATE, Timeline
from autoshard.plans.explain import MORE, print_asked, print_warnings
from autoshard.plans.program_plan import ProgramPlan
from autoshard.plans.text import folded, layout_text, pattern
from autoshard.printing import TextConsole, amount, seconds, table

_MOST_LAYOUTS = 8


_MOST_LINES, _MOST_CONSIDERED = 20, 4
"""On one screen: of stages, and of forms that were considered."""


def explain(plan: PipelinePlan, full: bool = False) -> str:
    """The explanation: about 40 lines with what matters most, or all there is."""
    console = TextConsole()
    timeline, groups = plan.timeline, equal_pipelines(plan)
    _summary(console, plan, timeline)
    _asked(console, plan)
    _slices(console, plan)
    _considered(console, plan, None if full else _MOST_CONSIDERED)
    lines = 0
    for n, group in enumerate(groups):
        lines += len(plan.pipeline(group.first).stages) + 3
        if n and lines > _MOST_LINES and not full:
            console.print(f"and {len(groups) - n} more kinds of pipelines\n")
            break
        _stages(console, plan, timeline, group)
    if not full:
        print_warnings(console, plan.warnings)
        console.print(MORE)
        return console.text
    _boundaries(console, plan, groups)
    _weights(console, plan, groups)
    _programs(console, plan)
    for warning in plan.warnings:
        console.print(f"warning: {warning}")
    return console.text


def _asked(console: Console, plan: PipelinePlan) -> None:
    """What annotations of pipelines and stages asked for."""
    if not plan.obeyed:
        return
    rows = table(
        "Asked for by annotations; what is asked inside stages stands with their programs",
        [("annotation", "left"), ("got", "left"), ("line", "left")],
    )
    for block in plan.obeyed:
        rows.add_row(block.asked, block.got, block.line)
    console.print(rows)
    console.print()


def _summary(console: Console, plan: PipelinePlan, timeline: Timeline) -> None:
    tasks = [e for e in timeline.events if e.phase is not None]
    updates = [e.start_s for e in timeline.events if e.name == UPDATE]
    first_s, last_s = min(e.start_s for e in tasks), max(e.stop_s for e in tasks)
    gathered_s = max(last_s, min(updates, default=timeline.step_s))
    spans = (
        (first_s, "weights come in"),
        (last_s - first_s, "pipelines"),
        (gathered_s - last_s, "gradients to their owners"),
        (timeline.step_s - gathered_s, "updates"),
    )
    parts = [f"{seconds(span_s)} {what}" for span_s, what in spans if span_s > 0]
    devices = ", ".join(f"{s.num_devices} x {s.device}" for s in plan.slices)
    console.print(f"Plan in stages for cluster `{plan.cluster}`: {devices}")
    console.print(f"  step     {seconds(timeline.step_s)} predicted = {' + '.join(parts)}")
    idle = sum(p.bubble_share for p in timeline.submeshes) / len(timeline.submeshes)
    fullest = timeline.fullest
    console.print(f"  idle     {idle:.1%} of the step, on average of {len(timeline.submeshes)} submeshes")
    limit = f" of {amount(fullest.limit_bytes)} allowed" if math.isfinite(fullest.limit_bytes) else ""
    console.print(f"  memory   {amount(fullest.peak_bytes)} per device{limit} where it is fullest, on {fullest.name}")
    for line in _proof(plan):
        console.print(line)
    console.print(f"  figures  {', '.join(dict.fromkeys(p.figures for p in plan.programs))}")
    console.print()


def _proof(plan: PipelinePlan) -> tuple[str, ...]:
    c = plan.certificate
    if not c.bound_s:
        return ("  proof    none: the arrangement was given, not searched for",)
    gap = f"{c.gap:.1%}" if math.isfinite(c.gap) else "unknown"
    return (
        f"  proof    by the costs of single layers, which the search compares: {seconds(c.searched_s)}, "
        "and no arrangement",
        f"           in its space below {seconds(c.bound_s)} (gap {gap}), found in {c.search_s:.1f} s",
    )


def _slices(console: Console, plan: PipelinePlan) -> None:
    """What each slice takes part with."""
    used: collections.Counter[int] = collections.Counter()
    work: collections.defaultdict[int, set[int]] = collections.defaultdict(set)
    for p, pipeline in enumerate(plan.arrangement.pipelines):
        for submesh, mesh in zip(pipeline.submeshes, plan.meshes[p], strict=True):
            used[submesh.slice] += mesh.num_devices
            work[submesh.slice].add(p)
    console.print(f"Slices of the cluster, and what they take of the {plan.batch_size} examples of a step")
    rows = table(
        "",
        [("slice", "left"), ("devices", "left"), ("used", "right"), ("limit", "right"), ("examples", "left")],
    )
    for n, part in enumerate(plan.slices):
        examples = sum(plan.pipeline(p).num_examples for p in work[n])
        shared = any(submesh.slice != n for p in work[n] for submesh in plan.pipeline(p).submeshes)
        share = f"{examples} ({examples / plan.batch_size:.0%})" + (", with other slices" if shared else "")
        rows.add_row(
            part.name,
            f"{part.num_devices} x {part.device}",
            str(used[n]) if used[n] else "left out",
            amount(part.limit_bytes) if math.isfinite(part.limit_bytes) else "unknown",
            share if used[n] else "none",
        )
    console.print(rows)
    console.print()


def _considered(console: Console, plan: PipelinePlan, most: int | None) -> None:
    if not plan.considered:
        return
    console.print("What was considered, by the costs of single layers")
    rows = table("", [("step", "right"), ("vs plan", "right"), ("arrangement", "left")])
    searched_s = plan.certificate.searched_s
    for one in sorted(plan.considered, key=lambda c: (c.step_s is None, c.step_s or 0.0))[:most]:
        step = "-" if one.step_s is None else seconds(one.step_s)
        versus = f"{one.step_s / searched_s:.2f} x" if one.step_s is not None and searched_s else "-"
        rows.add_row(step, versus, one.description + (f": {one.reason}" if one.reason else ""))
    console.print(rows)
    if most is not None and len(plan.considered) > most:
        console.print(f"and {len(plan.considered) - most} more")
    console.print()


def _stages(console: Console, plan: PipelinePlan, timeline: Timeline, group: EqualPipelines) -> None:
    """One line for each stage of alike pipelines; of figures that differ among them, the greatest."""
    pipeline = plan.pipeline(group.first)
    schedule = plan.durations.pipelines[group.first].schedule
    each = "each " if len(group.numbers) > 1 else ""
    console.print(
        f"{group.name}: {each}{pipeline.num_examples} examples as {pipeline.num_micro_batches} x "
        f"{pipeline.micro_batch_size}, {pipeline.schedule.value}"
    )
    columns = [("stage", "right"), ("layers", "left"), ("submesh", "left"), ("mesh", "left"), ("forward", "right")]
    columns += [("backward", "right"), *([("weights", "right")] if schedule.splits_backward else [])]
    columns += [("memory", "right"), ("limit", "right"), ("in flight", "right"), ("idle", "right")]
    rows = table("", columns)
    for s, part in enumerate(pipeline.stages):
        times = [plan.durations.pipelines[n].stages[s] for n in group.numbers]
        submesh = schedule.submesh_of(s)
        held = [one for one in timeline.submeshes if one.pipeline in group.numbers and one.submesh == submesh]
        forward_s, weight_s = max(t.forward_s for t in times), max(t.weight_s for t in times)
        backward_s = max(t.backward_s for t in times) + (0.0 if schedule.splits_backward else weight_s)
        limit_bytes = held[0].limit_bytes
        rows.add_row(
            str(s),
            _layers(plan, part.start, part.stop) + (", computed again" if part.rematerialise else ""),
            _several([plan.meshes[n][submesh].name for n in group.numbers]),
            ", ".join(f"{a}={n}" for a, n in plan.meshes[group.first][submesh].axes),
            seconds(forward_s),
            seconds(backward_s),
            *([seconds(weight_s)] if schedule.splits_backward else []),
            amount(max(h.peak_bytes for h in held)),
            amount(limit_bytes) if math.isfinite(limit_bytes) else "unknown",
            str(max(h.most_in_flight for h in held)),
            f"{max(h.bubble_share for h in held):.0%}",
        )
    console.print(rows)
    console.print()


def _layers(plan: PipelinePlan, start: int, stop: int) -> str:
    """Layers by number and name."""
    names = plan.layers.names
    if stop == start + 1:
        return f"{start}: {names[start]}"
    return f"{start}-{stop - 1}: {names[start]} .. {names[stop - 1]}"


def _several(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]}{',' if len(names) == 2 else ' ..'} {names[-1]}"


def _boundaries(console: Console, plan: PipelinePlan, groups: Sequence[EqualPipelines]) -> None:
    columns = [("pipeline", "left"), ("stages", "left"), ("sent", "right"), ("in", "right"), ("sent back", "right")]
    rows = table("", [*columns, ("in", "right"), ("made by", "left")])
    for group in groups:
        for transfer in plan.durations.pipelines[group.first].transfers:
            sent = crossing(plan.layers, plan.pipeline(group.first), transfer.source, transfer.target)
            rows.add_row(
                group.short_name,
                f"{transfer.source} -> {transfer.target}",
                amount(sent.forward_bytes),
                seconds(transfer.forward_s),
                amount(sent.backward_bytes),
                seconds(transfer.backward_s),
                ", ".join(plan.layers.names[layer] for layer in sent.makers),
            )
    if rows.row_count:
        console.print("What crosses the boundaries between stages, for each micro-batch")
        console.print(rows)
        console.print()


def _weights(console: Console, plan: PipelinePlan, groups: Sequence[EqualPipelines]) -> None:
    held = weights_of(plan)
    if not any(w.copied_bytes for w in held.values()):
        console.print("Every weight is read only where it lives: none is sent.\n")
        return
    console.print(
        "Weights: what each submesh owns, what it reads as copies, and how long copies and gradients are on their way"
    )
    columns = [("pipeline", "left"), ("submesh", "right"), ("owned", "right"), ("copies", "right")]
    rows = table("", [*columns, ("weights in", "right"), ("gradients in", "right"), ("update", "right")])
    for group in groups:
        schedule = plan.durations.pipelines[group.first].schedule
        for submesh in range(schedule.num_submeshes):
            own = [held[n, submesh] for n in group.numbers]
            stages = range(submesh, schedule.num_stages, schedule.num_submeshes)
            times = [plan.durations.pipelines[n] for n in group.numbers]
            most = lambda field, times=times, stages=stages: max(
                sum(getattr(t, field)[s] for s in stages) if getattr(t, field) else 0.0 for t in times
            )
            rows.add_row(
                group.short_name,
                str(submesh),
                amount(max(w.owned_bytes for w in own)),
                amount(max(w.copied_bytes for w in own)),
                seconds(most("weights_s")),
                seconds(most("gradients_s")),
                seconds(most("update_s")),
            )
    console.print(rows)
    console.print()


def _programs(console: Console, plan: PipelinePlan) -> None:
    """How each distinct stage is sharded."""
    for number, program in enumerate(plan.programs):
        e = program.estimate
        console.print(program_text(plan, number))
        traffic = f"{amount(e.comm_bytes)} sent in {seconds(e.comm_s)}" if e.comm_bytes else "no communication"
        console.print(f"{seconds(e.compute_s)} compute, {traffic}, {amount(e.flops, 'FLOP')} per device")
        print_asked(console, program.obeyed)
        _layouts(console, program)


def program_text(plan: PipelinePlan, number: int) -> str:
    """What a program of a plan is, in a line."""
    users = [one for one in plan.stage_ids if plan.program_of[one.pipeline][one.stage] == number]
    pipeline = plan.pipeline(users[0].pipeline)
    part = pipeline.stages[users[0].stage]
    return (
        f"Program {number} ({len(users)} x): layers {_layers(plan, part.start, part.stop)}, "
        f"a micro-batch of {pipeline.micro_batch_size}, {plan.programs[number].logical_mesh}"
    )


def _layouts(console: Console, program: ProgramPlan) -> None:
    named = [a for a in program.arguments if a.shape and a.name.split(".")[0] in ("params", "batch", "inputs")]
    kinds = collections.defaultdict(list)
    for a in named:
        kinds[pattern(a.name), a.shape, layout_text(a.entries)].append(a.name)
    rows = table("", [("path", "left"), ("n", "right"), ("shape", "left"), ("layout", "left")])
    largest = sorted(kinds.items(), key=lambda kind: -len(kind[1]) * math.prod(kind[0][1]))
    for (_, shape, layout), paths in largest[:_MOST_LAYOUTS]:
        rows.add_row(folded(paths), str(len(paths)), "x".join(map(str, shape)), layout)
    console.print(rows)
    if len(kinds) > _MOST_LAYOUTS:
        console.print(f"and {len(kinds) - _MOST_LAYOUTS} more kinds, which are smaller")
    console.print()
