"""Reading optimised HLO text: computations, instructions, their shapes, and how often each runs.

`compiled.as_text()` is the one public view of what XLA made of a program. Only what a verification needs is read; the
grammar is that of HLO's own printer (OpenXLA, xla/hlo/ir/hlo_instruction.cc, `HloInstruction::ToString`).
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence

from autoshard.errors import VerificationError

_BITS = {
    "pred": 8,
    "token": 0,
    "opaque": 0,
    "c64": 64,
    "c128": 128,
    "bf16": 16,
    "tf32": 32,
}
"""Bits of the element types whose names do not tell them; `f8e4m3fn` and `u32` tell theirs."""

_ARRAY = re.compile(r"(\w+)\[([\d,<=]*)\](?:\{(\d+))?")
_COMMENT = re.compile(r"/\*.*?\*/")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+)\s*(?:\(.*\))?.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = ")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(r"(calls|to_apply|body|condition|branch_computations|called_computations)=(\{[^}]*\}|%[\w.\-]+)")
_TRUE_FALSE = re.compile(r"(?:true|false)_computation=%([\w.\-]+)")
FURTHER_ROUNDS = "further_rounds"
"""The name of the loops in which look-ups send what exceeds their slots: they are expected not to run at all."""
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_LESS_THAN = re.compile(r"\bdirection=(LT|GT)\b")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """The type of one array: element type and dimensions.

    Attributes:
      innermost: The dimension whose elements lie together in memory, where the text tells; else the last one.
    """

    dtype: str
    dims: tuple[int, ...]
    innermost: int = dataclasses.field(default=-1, compare=False)

    @property
    def size_bytes(self) -> float:
        """Bytes, without padding."""
        return math.prod(self.dims) * bits_of(self.dtype) / 8


@functools.cache
def bits_of(dtype: str) -> int:
    """Bits of one element of an HLO type, such as 8 of `f8e4m3fn`.

    Raises:
      VerificationError: The type is not known.
    """
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[fsu](\d+)", dtype)
    if found is None:
        raise VerificationError(f"An HLO array has an element type that autoshard knows; received {dtype!r}.")
    return int(found.group(1))


def dtype_name(dtype: str) -> str:
    """NumPy's name of an HLO element type, such as `bfloat16` of `bf16`; `float8_e4m3fn` of `f8e4m3fn`."""
    kinds = {"bf": "bfloat", "f": "float", "s": "int", "u": "uint", "c": "complex"}
    found = re.match(r"(bf|[fsuc])(\d+)(\w*)$", dtype)
    if found is None:
        return dtype
    kind, bits, form = found.groups()
    return f"{kinds[kind]}{bits}" + (f"_{form}" if form else "")


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.

    Attributes:
      name, opcode: As printed; `all-reduce-start` and the like stay as they are.
      result: The arrays of the result, tuples flattened.
      operands: Names of the operands.
      called: Names of the computations that it calls.
      trips: How often a loop runs what it calls; None where its text does not tell, and for all that is no loop.
      literal: What stands in the place of operands: the value of a constant, the number of a parameter.
      attributes: The text after the operands.
    """

    name: str
    opcode: str
    result: tuple[Array, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    trips: int | None
    literal: str
    attributes: str

    @property
    def op_name(self) -> str:
        """The path of names that JAX gave the operation; empty where the compiler has dropped it."""
        found = _OP_NAME.search(self.attributes)
        return found.group(1) if found else ""

    def called_as(self, role: str) -> str:
        """The computation that it calls in a role, such as the `body` of a loop."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        if found is None:
            raise VerificationError(
                f"`{self.opcode}` {self.name} must call a {role}; received {self.attributes[:200]!r}."
            )
        return found.group(1)

    @property
    def result_bytes(self) -> float:
        """Bytes of all arrays of the result."""
        return sum(a.size_bytes for a in self.result)


@dataclasses.dataclass(frozen=True)
class Computation:
    """A computation: its instructions by name, in order, and the name of the one whose result it returns."""

    name: str
    instructions: Mapping[str, Instruction]
    root: str

    @functools.cached_property
    def users(self) -> Mapping[str, Sequence[Instruction]]:
        """By name, the instructions that read it."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """An instruction that runs `times` times in a step; `caller` is what called its computation, None for the entry."""

    computation: Computation
    instruction: Instruction
    times: float
    caller: "Run | None"

    def operand(self, name: str) -> "Run | None":
        """What makes an operand: an instruction here, or outside, of a parameter; None if that cannot be told."""
        made = self.computation.instructions.get(name)
        if made is None:
            return None
        if made.opcode != "parameter" or self.caller is None:
            return Run(self.computation, made, self.times, self.caller)
        given, number = self.caller.instruction, int(made.literal)
        if given.opcode in ("while", "conditional") or number >= len(given.operands):
            return None
        return self.caller.operand(given.operands[number])


@dataclasses.dataclass(frozen=True, slots=True)
class HloModule:
    """A whole program: its computations by name, and the name of the first one to run."""

    computations: Mapping[str, Computation]
    entry: str

    def runs(self, fused: bool = False) -> Iterator[Run]:
        """Every instruction that runs, and how often in one step; those inside fusions only if `fused`.

        Each branch of a conditional counts as often as any other. A loop without a known count counts once.
        """
        return self._visit(self.entry, 1.0, None, ("while", "call", "conditional", "async-start") + ("fusion",) * fused)

    def scheduled(self) -> tuple[Computation, ...]:
        """The computations whose instructions have a schedule: the entry's, those of loops and of branches."""
        runs = (r for r in self.runs() if r.caller is None or r.caller.instruction.opcode != "async-start")
        return tuple([self.computations[name] for name in dict.fromkeys(run.computation.name for run in runs)])

    def _visit(self, name: str, times: float, caller: Run | None, callers: tuple[str, ...]) -> Iterator[Run]:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            run = Run(computation, instruction, times, caller)
            yield run
            if instruction.opcode not in callers:
                continue
            inner = times
            if instruction.opcode == "while":
                inner *= self.trips(instruction)
            elif instruction.opcode == "conditional":
                inner /= len(instruction.called)
            for callee in instruction.called:
                yield from self._visit(callee, inner, run, callers)

    def trips(self, loop: Instruction) -> int:
        """A loop's count as the compiler tells it, or as its condition does: a counter from 0 on below a constant.

        XLA:TPU tells no counts; the counters of `jax.lax.scan` and `fori_loop` begin at 0 there.
        """
        if loop.trips is not None:
            return loop.trips
        if FURTHER_ROUNDS in loop.op_name.split("/"):
            return 0
        for callee in loop.called:
            condition = self.computations[callee]
            test = Run(condition, condition.instructions[condition.root], 1.0, None)
            if test.instruction.opcode == "fusion":
                inner = self.computations[test.instruction.called[0]]
                test = Run(inner, inner.instructions[inner.root], 1.0, test)
            less = _LESS_THAN.search(test.instruction.attributes)
            if test.instruction.opcode != "compare" or less is None:
                continue
            bound = test.operand(test.instruction.operands[less.group(1) == "LT"])
            if bound is not None and bound.instruction.opcode == "constant" and bound.instruction.literal.isdecimal():
                return int(bound.instruction.literal)
        return 1


def parse(text: str) -> HloModule:
    """Reads the text of an HLO module.

    Raises:
      VerificationError: It is not one.
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
        if line.startswith("}"):
            if name:
                computations[name] = Computation(name, current, root or next(reversed(current), ""))
            name, root, current = "", "", {}
        elif not line.startswith(" "):
            header = _HEADER.match(line)
            if header and not line.startswith("HloModule"):
                name = header.group(2)
                entry = name if header.group(1) else entry
        elif name and (head := _INSTRUCTION.match(line)):
            instruction = _instruction(head.group(2), _COMMENT.sub("", line[head.end() :]))
            current[instruction.name] = instruction
            root = instruction.name if head.group(1) else root
    if not entry:
        raise VerificationError(
            "The text of a compiled program has an ENTRY computation; none was found in what the compiler returned: "
            f"{text[:200]!r}. This version of XLA may print programs in another way."
        )
    return HloModule(computations, entry)


def _instruction(name: str, text: str) -> Instruction:
    """An instruction from the text after `name = `."""
    split = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    kind, rest = text[:split], text[split:].lstrip()
    opening = rest.index("(")
    closing = _closing(rest, opening)
    attributes = rest[closing + 1 :]
    called = [n for _, listed in _CALLED.findall(attributes) for n in _NAME.findall(listed)]
    called += _TRUE_FALSE.findall(attributes)
    trips = _TRIPS.search(attributes)
    inside = rest[opening + 1 : closing]
    return Instruction(
        name,
        rest[:opening],
        tuple(
            Array(dtype, tuple(int(n.lstrip("<=")) for n in dims.split(",") if n), int(innermost or -1))
            for dtype, dims, innermost in _ARRAY.findall(kind)
        ),
        tuple(_NAME.findall(inside)),
        tuple(called),
        int(trips.group(1)) if trips else None,
        inside if rest[:opening] in ("constant", "parameter") else "",
        attributes,
    )


def _closing(text: str, opening: int) -> int:
    """The index of the parenthesis that closes the one at `opening`."""
    depth = 0
    for index in range(opening, len(text)):
        if text[index] == "(":
            depth += 1
        elif text[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    raise VerificationError(f"The parentheses of an HLO instruction must close; received {text[:200]!r}.")
