"""Compiles what one place runs in one level, from nothing but that and the shardings of what the place holds."""

import dataclasses
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.compiler.options import compiler_options
from autoshard.pipeline.run.place_arrays import Holdings, Key
from autoshard.pipeline.split.mpmd import Exchange, PlacedProgram, PlaceProgram


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """One compiled program.

    Attributes:
      level, place: When and where it runs.
      lowered, compiled: As `jax.jit(f).lower(...)` and its `.compile()` give.
      inputs, outputs: What it reads and makes. donated: Which of the inputs' buffers it reuses, by position.
    """

    level: int
    place: int
    lowered: jax.stages.Lowered
    compiled: jax.stages.Compiled
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    donated: tuple[int, ...]


def compile_all(holdings: Holdings, places: frozenset[int]) -> Iterator[Compiled]:
    """The programs of `places`, in the order in which they run."""
    left: dict[tuple[int, int], jax.sharding.Sharding] = {}
    for number, level in enumerate(holdings.program.levels):
        yield from (_compile(holdings, number, one, left) for one in level.programs if one.place in places)


def _compile(
    holdings: Holdings,
    level: int,
    one: PlaceProgram,
    left: MutableMapping[tuple[int, int], jax.sharding.Sharding],
) -> Compiled:
    """Compiles `one`; `left` says how lies what an earlier level left on a place for a later one, and is added to."""
    place = one.place
    inputs = tuple(dict.fromkeys(holdings.key(v, place) for v in one.inputs))
    sent = [x for x in holdings.exchanges if x.source == place and x.values[0] in one.outputs]
    bundles = tuple(x for x in sent if len(x.values) > 1)
    fixed = {x.values[0] for x in sent if len(x.values) == 1} | {v for v, p in holdings.results if p == place}
    later = set(_read_later(holdings.program, level, place))
    values = tuple(v for v in one.outputs if v in fixed or v in later)

    def run(*arrays: Any) -> list[Any]:
        env = dict(holdings.unpacked(inputs, arrays))
        made = dict(zip(one.outputs, one(*(env[v] for v in one.inputs)), strict=True))
        return [*(made[v] for v in values), *(jnp.concatenate([made[v].ravel() for v in x.values]) for x in bundles)]

    run.__name__ = f"level{level}_place{place}"
    given = [holdings.struct(key, place, left.get((key, place))) for key in inputs]
    ends = [holdings.struct(v, place) if v in fixed else _like_an_input(holdings, v, place, given) for v in values]
    ends += [holdings.struct(x, place) for x in bundles]
    donated = _reused(holdings, level, place, inputs, given, ends)
    jitted = jax.jit(
        run,
        out_shardings=[None if e is None else e.sharding for e in ends],
        donate_argnums=donated,
        keep_unused=True,
        compiler_options=compiler_options(holdings.meshes[place].devices.flat[0].platform),
    )
    lowered = jitted.lower(*given)
    compiled = lowered.compile()
    left.update(((v, place), s) for v, s in zip(values, compiled.output_shardings, strict=False))
    return Compiled(level, place, lowered, compiled, inputs, (*values, *bundles), donated)


def _like_an_input(
    holdings: Holdings, value: int, place: int, given: Sequence[jax.ShapeDtypeStruct]
) -> jax.ShapeDtypeStruct | None:
    """How to lay what only this place reads: like an input of the same type, whose buffer it may take over.

    None: as XLA chooses, on the devices of the inputs.
    """
    result = holdings.struct(value, place)
    for struct in given:
        if result.shape and (struct.shape, struct.dtype) == (result.shape, result.dtype):
            return holdings.struct(value, place, struct.sharding)
    return None if given else result


def _read_later(program: PlacedProgram, level: int, place: int) -> Iterator[int]:
    """What a place's programs read after a level."""
    for other in program.levels[level + 1 :]:
        yield from (v for one in other.programs if one.place == place for v in one.inputs)


def _reused(
    holdings: Holdings,
    level: int,
    place: int,
    inputs: Sequence[Key],
    given: Sequence[jax.ShapeDtypeStruct],
    ends: Sequence[jax.ShapeDtypeStruct | None],
) -> tuple[int, ...]:
    """The inputs whose buffers an output of the same type and sharding takes over, by position.

    These are donated inputs and what an earlier level made, where nothing reads them later; not what came from another
    place, which may share its buffer with what was sent.
    """
    free = [end for end in ends if end is not None]
    chosen: list[int] = []
    for slot, (key, struct) in enumerate(zip(inputs, given, strict=True)):
        is_kept = holdings.last_use[key, place] != level or (key, place) in holdings.received
        if isinstance(key, Exchange) or is_kept:
            continue
        if key < len(holdings.program.inputs) and key not in holdings.donated:
            continue
        for end in free:
            is_same = (end.shape, end.dtype) == (struct.shape, struct.dtype)
            if is_same and end.sharding.is_equivalent_to(struct.sharding, len(end.shape)):
                free.remove(end)
                chosen.append(slot)
                break
    return tuple(chosen)
