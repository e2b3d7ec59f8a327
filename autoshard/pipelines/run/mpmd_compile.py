"""Compiles what one submesh runs in one level, from nothing but that and the shardings of what the submesh holds."""

import dataclasses
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.compiler.options import compiler_options
from autoshard.compiler.schedule import Schedule
from autoshard.pipelines.run.mpmd_arrays import ArrayKey, MpmdArrays
from autoshard.pipelines.split.mpmd_program import Exchange, MpmdProgram, SubmeshProgram


@dataclasses.dataclass(frozen=True, slots=True)
class CompiledProgram:
    """One compiled program.

    Attributes:
      level, submesh: When and where it runs.
      lowered, compiled: As `jax.jit(f).lower(...)` and its `.compile()` give.
      inputs, outputs: What it reads and makes. donated: Which of the inputs' buffers it reuses, by position.
    """

    level: int
    submesh: int
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    inputs: tuple[ArrayKey, ...]
    outputs: tuple[ArrayKey, ...]
    donated: tuple[int, ...]


def compile_programs(layout: MpmdArrays, submeshes: frozenset[int]) -> Iterator[CompiledProgram]:
    """The programs of `submeshes`, in the order in which they run."""
    left: dict[tuple[ArrayKey, int], jax.sharding.Sharding] = {}
    for number, level in enumerate(layout.program.levels):
        yield from (_compile(layout, number, one, left) for one in level.programs if one.submesh in submeshes)


def _compile(
    layout: MpmdArrays,
    level: int,
    one: SubmeshProgram,
    left: MutableMapping[tuple[ArrayKey, int], jax.sharding.Sharding],
) -> CompiledProgram:
    """Compiles `one`; `left` says how lies what an earlier level left on a submesh for a later one, and is added to."""
    submesh = one.submesh
    inputs = tuple(dict.fromkeys(layout.key(v, submesh) for v in one.inputs))
    sent = [x for x in layout.exchanges if x.source == submesh and x.values[0] in one.outputs]
    bundles = tuple(x for x in sent if len(x.values) > 1)
    fixed = {x.values[0] for x in sent if len(x.values) == 1} | {v for v, p in layout.results if p == submesh}
    later = set(_read_later(layout.program, level, submesh))
    values = tuple(v for v in one.outputs if v in fixed or v in later)

    def run(*arrays: Any) -> list[Any]:
        env = dict(layout.unpacked(inputs, arrays))
        made = dict(zip(one.outputs, one(*(env[v] for v in one.inputs)), strict=True))
        return [*(made[v] for v in values), *(jnp.concatenate([made[v].ravel() for v in x.values]) for x in bundles)]

    run.__name__ = f"level{level}_submesh{submesh}"
    given = [layout.struct(key, submesh, left.get((key, submesh))) for key in inputs]
    ends = [layout.struct(v, submesh) if v in fixed else _like_an_input(layout, v, submesh, given) for v in values]
    ends += [layout.struct(x, submesh) for x in bundles]
    donated = _reused(layout, level, submesh, inputs, given, ends)
    jitted = jax.jit(
        run,
        out_shardings=[None if e is None else e.sharding for e in ends],
        donate_argnums=donated,
        keep_unused=True,
        compiler_options=compiler_options(layout.meshes[submesh].devices.flat[0].platform, Schedule.LEAST_MEMORY),
    )
    lowered = jitted.lower(*given)
    compiled = lowered.compile()
    left.update(((v, submesh), s) for v, s in zip(values, compiled.output_shardings, strict=False))
    return CompiledProgram(level, submesh, lowered, compiled, inputs, (*values, *bundles), donated)


def _like_an_input(
    layout: MpmdArrays, value: int, submesh: int, given: Sequence[jax.ShapeDtypeStruct]
) -> jax.ShapeDtypeStruct | None:
    """How to lay what only this submesh reads: like an input of the same type, whose buffer it may take over.

    None: as XLA chooses, on the devices of the inputs.
    """
    result = layout.struct(value, submesh)
    for struct in given:
        if result.shape and (struct.shape, struct.dtype) == (result.shape, result.dtype):
            return layout.struct(value, submesh, struct.sharding)
    return None if given else result


def _read_later(program: MpmdProgram, level: int, submesh: int) -> Iterator[int]:
    """What a submesh's programs read after a level."""
    for other in program.levels[level + 1 :]:
        yield from (v for one in other.programs if one.submesh == submesh for v in one.inputs)


def _reused(
    layout: MpmdArrays,
    level: int,
    submesh: int,
    inputs: Sequence[ArrayKey],
    given: Sequence[jax.ShapeDtypeStruct],
    ends: Sequence[jax.ShapeDtypeStruct | None],
) -> tuple[int, ...]:
    """The inputs whose buffers an output of the same type and sharding takes over, by position.

    These are donated inputs and what an earlier level made, where nothing reads them later; not what came from another
    submesh, which may share its buffer with what was sent.
    """
    free = [end for end in ends if end is not None]
    chosen: list[int] = []
    for slot, (key, struct) in enumerate(zip(inputs, given, strict=True)):
        is_kept = layout.last_use[key, submesh] != level or (key, submesh) in layout.received
        if isinstance(key, Exchange) or is_kept:
            continue
        if key < len(layout.program.inputs) and key not in layout.donated:
            continue
        for end in free:
            is_same = (end.shape, end.dtype) == (struct.shape, struct.dtype)
            if is_same and end.sharding.is_equivalent_to(struct.sharding, len(end.shape)):
                free.remove(end)
                chosen.append(slot)
                break
    return tuple(chosen)
