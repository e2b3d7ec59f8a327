"""Every exception autoshard raises, under one base class.

A message states the rule, what was received, which tensor or line of user code it concerns, and the next step.
"""


class AutoshardError(Exception):
    """Base class of all errors raised by autoshard."""


class FileFormatError(AutoshardError):
    """A file cannot be read: missing, too large, malformed, of an unknown version, or with unknown keys."""


class FolderError(AutoshardError):
    """A folder for what must come from this user alone cannot be made, or others could have written to it."""


class ClusterError(AutoshardError):
    """A cluster description contradicts itself or lacks what is asked of it."""


class MeshError(AutoshardError):
    """A logical mesh does not fit the devices it is laid over."""


class TraceError(AutoshardError):
    """A traced program holds something that autoshard cannot represent."""


class PinError(AutoshardError):
    """A pin (a sharding the user insists on) is malformed, matches nothing, or contradicts another."""


class AnnotationError(AutoshardError):
    """What annotations in a program ask for cannot be had, or contradicts itself; the message shows the lines."""


class LayoutError(AutoshardError):
    """A layout is not legal for the tensor it is given to."""


class SolverError(AutoshardError):
    """The solver ended without a usable solution."""


class MemoryBudgetError(SolverError):
    """No plan fits the memory budget; the message tells the least budget known to do."""


class NotFasterError(SolverError):
    """No plan is faster than the one that it had to beat: proven."""


class PlanMismatchError(AutoshardError):
    """A plan is applied to a function or to devices that it was not made for."""


class ConfigError(AutoshardError):
    """A training configuration is invalid."""


class TrainingError(AutoshardError):
    """A training run cannot go on: a loss that is not finite, data that cannot be read, a checkpoint not written."""


class ExportError(AutoshardError):
    """A plan cannot be said in the form asked for; the message names the tensors that cannot and what helps."""


class MissingExtraError(AutoshardError):
    """An optional library is needed that is not installed, or a later version of one that is."""


class VerificationError(AutoshardError):
    """A planned step cannot be compiled ahead of time, or what the compiler made of it cannot be read."""


class StageError(AutoshardError):
    """A training step cannot be cut into stages, shared out over pipelines, or run so; the message names what fails."""


class ScheduleError(AutoshardError):
    """A pipeline's schedule cannot be made or run: its sizes do not fit, or tasks are missing or wait in a circle."""


class TransferError(AutoshardError):
    """A tensor does not arrive from another process, or cannot be moved as asked."""


class ElasticError(AutoshardError):
    """A supervised run cannot go on, or what is asked of it is not possible."""


class ShareError(AutoshardError):
    """Jobs cannot share a cluster as asked: a jobs file, a trace or a footprint is wrong, or nothing fits."""
