"""The outcomes of verifying one plan for several targets, or each of its programs, and their file."""

import dataclasses
from pathlib import Path

import pydantic

from autoshard.errors import FileFormatError
from autoshard.files import read_json, write_text_atomically
from autoshard.verify.verification import Verification


@dataclasses.dataclass(frozen=True, slots=True)
class Failure:
    """A target that the plan could not be verified for, and why."""

    target: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of verifying one plan for several targets, or each program of a plan in stages, in order.

    Attributes:
      outcomes: What came of each. titles: What each program is, in a line; empty for plans of one program.
    """

    outcomes: tuple[Verification | Failure, ...]
    titles: tuple[str, ...] = ()

    @property
    def is_confirmed(self) -> bool:
        """Whether all were verified, and the compiled programs do what was predicted."""
        return not self.exit_status

    @property
    def exit_status(self) -> int:
        """0 if all are confirmed, 1 if one disagrees, 2 if one could not be verified."""
        if any(isinstance(o, Failure) for o in self.outcomes):
            return 2
        return int(any(isinstance(o, Verification) and not o.is_confirmed for o in self.outcomes))

    @property
    def disagreements(self) -> dict[str, tuple[str, ...]]:
        """By target; where several plans were verified for one, by plan and target."""
        verified = [o for o in self.outcomes if isinstance(o, Verification)]
        are_alone = len({o.target for o in verified}) == len(verified)
        return {o.target if are_alone else f"{o.plan} for {o.target}": o.disagreements for o in verified}

    def __str__(self) -> str:
        titles = self.titles or ("",) * len(self.outcomes)
        told = (str(o) if isinstance(o, Verification) else f"{o.target}: {o.reason}" for o in self.outcomes)
        return "\n".join("\n".join(filter(None, pair)) for pair in zip(titles, told, strict=True))

    def save(self, path: str | Path) -> None:
        """Writes JSON; the file appears whole or not at all."""
        document = _Document(
            format="autoshard-verification",
            version=1,
            verified=tuple(o for o in self.outcomes if isinstance(o, Verification)),
            failed=tuple(o for o in self.outcomes if isinstance(o, Failure)),
            disagreements=self.disagreements,
            exit_status=self.exit_status,
        )
        write_text_atomically(path, document.model_dump_json(indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Reads what `save` wrote: first the verifications, then the failures.

        Raises:
          FileFormatError: It is something else.
        """
        try:
            document = _Document.model_validate(read_json(path))
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            raise FileFormatError(
                f"`{path}` is not the JSON of a verification: at `{'.'.join(map(str, first['loc']))}`: {first['msg']}. "
                "Verify again."
            ) from error
        return cls((*document.verified, *document.failed))


class _Document(pydantic.BaseModel):
    """The file: both kinds of outcomes, and what follows from them for readers that know no tolerances."""

    model_config = pydantic.ConfigDict(extra="forbid")
    format: str
    version: int
    verified: tuple[Verification, ...]
    failed: tuple[Failure, ...]
    disagreements: dict[str, tuple[str, ...]]
    exit_status: int
