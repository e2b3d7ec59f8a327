"""The schema of a training configuration, and reading it from YAML with overrides from the command line.

Nothing in a configuration names code: models, optimizers and data are looked up in the tables of `models.py`,
`optimizers.py` and `registry.py`.
"""

import os
import pathlib
import types
import typing
from collections.abc import Sequence
from typing import Annotated, Any, Literal, get_args, get_origin

import pydantic
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)

from autoshard.cost.host_copies import Offload
from autoshard.errors import ConfigError, FileFormatError
from autoshard.files import parse_yaml, read_yaml
from autoshard.train.look_up import valid_names


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_truth_value(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuses `true` where a number is wanted, which Python takes for 1."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and _takes(annotation, int, float) and not _takes(annotation, bool):
            raise ValueError("Input should be a number")
        return value


def _takes(annotation: Any, *kinds: type) -> bool:
    """Whether a type is one of `kinds`, or a union with one."""
    parts = get_args(annotation) if get_origin(annotation) in (Annotated, types.UnionType, typing.Union) else ()
    return annotation in kinds or any(_takes(part, *kinds) for part in parts)


class ModelSection(_Section):
    """Which model to train.

    Attributes:
        name: a family of `autoshard_models.zoo.FAMILIES`.
        preset: one of that family's named sizes.
        overrides: fields of the model's configuration that differ from the preset.
    """

    name: str = "gpt"
    preset: str = Field(default="tiny", coerce_numbers_to_str=True)
    overrides: dict[str, bool | int | float | str | list[int]] = Field(default_factory=dict)


class OptimizerSection(_Section):
    """How gradients become updates.

    Attributes:
        name: a name in `optimizers.OPTIMIZERS`.
        learning_rate: the peak learning rate.
        weight_decay: decoupled weight decay; only for `adamw` and `adafactor`.
        warmup_steps: steps over which the learning rate rises linearly from 0.
        schedule: what follows the warm-up; `cosine` and `linear` fall to a tenth of the peak at `train.steps`.
        clip_norm: largest global gradient norm, or null not to clip.
        num_micro_batches: parts that the batch is run in, one after another, to need less memory.
        loss_scaling: scale the loss so that small gradients survive in half precision, and leave out steps whose
            gradients overflow.
    """

    name: str = "adamw"
    learning_rate: PositiveFloat = 3e-4
    weight_decay: NonNegativeFloat = 0.1
    warmup_steps: NonNegativeInt = 0
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    clip_norm: PositiveFloat | None = 1.0
    num_micro_batches: PositiveInt = 1
    loss_scaling: bool = False


class DataSection(_Section):
    """What to train on.

    Attributes:
        name: a name in `registry.DATA`; null for what suits the family, such as `python_sources` for language models.
        path: the file or folder of the `text` or `criteo` data; relative to the configuration file.
        batch_size: examples per step (sequences, images, clicks, graphs), over all devices.
        sequence_length: tokens per sequence; null for the model's own length. Language models only.
        seed: fixes which examples each step reads.
        eval_fraction: the part of the data that is kept for evaluation and never trained on.
        read_ahead: batches that are read while a step runs, each in a thread of its own.
    """

    name: str | None = None
    path: str | None = None
    batch_size: PositiveInt = 32
    sequence_length: PositiveInt | None = None
    seed: NonNegativeInt = 0
    eval_fraction: float = Field(default=0.05, gt=0, lt=1)
    read_ahead: PositiveInt = 2


class TrainSection(_Section):
    """How long to train and what to keep.

    Attributes:
        steps: the number of the last step.
        log_every: steps between two lines of metrics.
        output_dir: folder of metrics, plan and checkpoints; relative to the working directory.
        seed: fixes the initial parameters and the dropout masks.
        resume: continue from the latest checkpoint in `output_dir`, if there is one.
        checkpoint_every: steps between two checkpoints; null to save at the end and on Ctrl-C only.
        memory_every: steps between two copies of the state in the memory of hosts, from which `autoshard launch`
            restores after a loss; null for none.
        keep_checkpoints: the newest checkpoints that stay; older ones are deleted.
        eval_every: steps between two evaluations; null for none.
        eval_batches: batches of held-out data in an evaluation.
        tensorboard: also write metrics for TensorBoard, in `output_dir/tensorboard`.
        profile_first_step, profile_steps: record a `jax.profiler` trace of so many steps from this one on, in
            `output_dir/profile`; null for none.
        on_nonfinite: what to do when the loss is no longer finite: `stop` finds where the first such value arose and
            ends the run with an error that says so; `continue` reports it and goes on.
    """

    steps: PositiveInt = 100
    log_every: PositiveInt = 10
    checkpoint_every: PositiveInt | None = None
    memory_every: PositiveInt | None = 1
    keep_checkpoints: PositiveInt = 2
    eval_every: PositiveInt | None = None
    eval_batches: PositiveInt = 8
    tensorboard: bool = False
    profile_first_step: PositiveInt | None = None
    profile_steps: PositiveInt = 3
    on_nonfinite: Literal["stop", "continue"] = "stop"
    output_dir: str = Field(default="runs/default", coerce_numbers_to_str=True)
    seed: NonNegativeInt = 0
    resume: bool = False


class StagesSection(_Section):
    """What is fixed where a training step is cut into stages; null leaves it to the search.

    A stage is a run of consecutive layers on a mesh of its own. Pipelines of stages run side by side, each with its own
    share of the batch, which it takes in micro-batches. See `autoshard.StageOptions`.

    Attributes:
        num_stages: stages of each pipeline; 1 for replicas of the whole model only.
        num_micro_batches: micro-batches of the pipeline that takes most.
        num_pipelines: pipelines side by side.
        micro_batch_sizes: numbers of examples of a micro-batch that are tried.
        schedules: orders of the tasks that are tried: `gpipe`, `1f1b`, `interleaved`, `zb-h1`.
        most_devices_per_stage: devices of a stage, at most.
        most_chunks: stages on one mesh, at most, where they are interleaved; null for the default.
    """

    num_stages: PositiveInt | None = None
    num_micro_batches: PositiveInt | None = None
    num_pipelines: PositiveInt | None = None
    micro_batch_sizes: list[PositiveInt] | None = Field(default=None, min_length=1)
    schedules: list[Literal["gpipe", "1f1b", "interleaved", "zb-h1"]] | None = Field(default=None, min_length=1)
    most_devices_per_stage: PositiveInt | None = None
    most_chunks: PositiveInt | None = None


class AnnotationSection(_Section):
    """What the planner is asked for, as by annotations in the model's code; see docs/guide_annotations.md.

    Attributes:
        scope: pattern of the names of scopes in the model (`jax.named_scope`) that it is for; null for all of the loss.
        replicate: replicas, each with its part of the examples.
        split: parts into which what is inside is split; one of `replicate` and `split` is given.
        dims: lengths of the dimensions that `split` may split, by a name for people.
        colocate: whether `split` takes the devices of the `replicate` around it.
    """

    scope: str | None = None
    replicate: PositiveInt | None = None
    split: PositiveInt | None = None
    dims: dict[str, PositiveInt] = Field(default_factory=dict)
    colocate: bool = False

    @pydantic.model_validator(mode="after")
    def _asks_for_one(self) -> "AnnotationSection":
        if (self.replicate is None) == (self.split is None) or (self.replicate is not None and self.colocate):
            raise ValueError("an annotation is either `replicate`, or `split` with `dims` and `colocate`")
        return self


class LookupsSection(_Section):
    """What is known of look-ups in embedding tables; see docs/guide_recommenders.md.

    Attributes:
        zipf_exponent: how unevenly rows are looked up: 0 for evenly; the k-th most frequent has the weight k^-exponent.
        is_ranked: whether rows are numbered by their frequency, the most frequent first; else in no order, as hashed.
        slots_factor: slots for the ids that a device has for one owner of rows, as a multiple of the largest number
            expected; what exceeds them is sent in further rounds.
        exchange: for which look-ups rows may be exchanged for ids: `sparse`, those with fewer ids than rows; `any`; or
            `never`.
    """

    zipf_exponent: float = Field(default=0.0, ge=0)
    is_ranked: bool = False
    slots_factor: PositiveFloat = 1.0
    exchange: Literal["sparse", "any", "never"] = "sparse"


class PlanSection(_Section):
    """What the planner may use.

    Attributes:
        cluster: a cluster file, relative to the configuration file; null for the live devices.
        mesh: size of each mesh axis by name, or null to let the planner choose.
        memory_budget_bytes: memory that the plan may use on each device; null for the device's own.
        time_limit_s: seconds after which the planner takes the best plan so far; null for a limit on each mesh alone.
        work_limit: limit of the planner in units of work instead of time, which makes its answer repeatable; or null.
        cache: keep solutions on disk, and answer from them or start from them.
        check: compile the plan ahead of time for its devices, and correct it where the compiler does otherwise.
        check_meshes: with `check`, on GPUs: of how many of the best meshes plans are compiled; the fastest is taken.
        remat: what the layers of the model keep for their backward pass: `as_written`, or `search` for the fastest
            policy that fits the memory, of which the model's own `jax.checkpoint` is then one candidate.
        micro_batches: in how many micro-batches a step runs its batch: `as_written`, as `optimizer.num_micro_batches`
            says; a number; or `search` for what is fastest.
        pipelines: `search`: on devices of one kind, the step is planned as one program and in pipeline stages (with
            what `stages` fixes), and the faster plan is taken; `never`: one program; null: one program, unless `stages`
            are given.
        offload: `state`: optimizer state may lie in the memory of the hosts, copied in and out every step, where the
            cluster describes them; `activations`: what the backward pass reads may lie there between the passes;
            `all`: both; `never`: all stays on the devices; null: all does, unless nothing fits so.
        decompose: which matrix products may run in pieces, beside the transfers of what they gather or scatter:
            `never`, `faster` (than a whole collective that is waited for), or `any`.
        pins: shardings that the plan must have, by path pattern of the tensor: for each dimension a mesh axis, a list
            of them, or null, as in `state.params.*.up.kernel: [null, tensor]`.
        start: an earlier plan file, relative to the configuration file, from whose layouts the search starts; or null.
        lookups: what is known of look-ups in embedding tables.
        annotations: what the planner is asked for, the outermost first: replicas, and splits of parts of the model.
        stages: cut the step into stages, with what this section fixes (`{}`: nothing); null for one program on one
            mesh, except where the cluster has devices of several kinds, which needs stages.
    """

    cluster: str | None = None
    mesh: dict[str, PositiveInt] | None = None
    memory_budget_bytes: PositiveInt | None = None
    time_limit_s: PositiveFloat | None = None
    work_limit: PositiveFloat | None = None
    cache: bool = True
    check: bool = False
    check_meshes: PositiveInt = 1
    remat: Literal["as_written", "search"] = "as_written"
    micro_batches: PositiveInt | Literal["as_written", "search"] = "as_written"
    pipelines: Literal["never", "search"] | None = None
    offload: Offload | None = None
    decompose: Literal["never", "faster", "any"] = "never"
    pins: dict[str, list[str | list[str] | None]] = Field(default_factory=dict)
    start: str | None = None
    lookups: LookupsSection = Field(default_factory=LookupsSection)
    annotations: list[AnnotationSection] = Field(default_factory=list)
    stages: StagesSection | None = None


class StragglersSection(_Section):
    """What is done about slow devices; see docs/guide_stragglers.md.

    Attributes:
        mode: `off`; `migrate` moves hidden units, heads and experts to other devices of a tensor axis, and results stay
            what they are; `resize` lets a slow device leave some of its own out; `semi` does both; `auto` as `semi` as
            far as `max_loss_share` allows. With `parts`, what moves are examples, which `migrate` and `auto` do.
        parts: micro-batches of equal size that the replicas of data parallelism share out by their speeds; null for a
            plan with a tensor axis.
        max_loss_share: the most units that a device may leave out, as a share of an even share; null for a half in
            `resize` and `semi`, and for none in `auto`.
        priority: what stays when units are left out: `random`, `change` (whose weights changed most lately), or
            `gradient` (whose gradients are largest).
        unbiased: what is left of a device's units counts for those left out.
        absorbs: the slowdown of one device that moving units evens out; places for that take memory.
        threshold: the slowdown that is named.
        replan_after: steps after which a slowdown that shares cannot even out calls for another plan.
        emulate: ranks of the tensor axis that are slowed down, and how many times; for tests and demonstrations.
        emulate_from, emulate_until: the first and the last step of that; null for the end of the run.
    """

    mode: Literal["off", "resize", "migrate", "semi", "auto"] = "off"
    max_loss_share: float | None = Field(default=None, ge=0, le=1)
    priority: Literal["random", "change", "gradient"] = "random"
    unbiased: bool = False
    absorbs: float = Field(default=4.0, ge=1)
    threshold: float = Field(default=1.3, gt=1)
    replan_after: PositiveInt = 1000
    emulate: dict[NonNegativeInt, Annotated[float, Field(ge=1)]] = Field(default_factory=dict)
    emulate_from: PositiveInt = 1
    emulate_until: PositiveInt | None = None
    parts: PositiveInt | None = None

    @pydantic.model_validator(mode="after")
    def _parts_only_move(self) -> "StragglersSection":
        if self.parts is not None and self.mode in ("resize", "semi"):
            raise ValueError(
                f"with parts of a batch nothing is left out: mode is migrate, auto or off, not {self.mode}"
            )
        return self

    @property
    def shares_batch(self) -> bool:
        """Whether replicas share a batch out unequally."""
        return self.parts is not None and (self.mode != "off" or bool(self.emulate))


class ExecutionSection(_Section):
    """Embedding tables in host memory, and how steps follow each other then; see docs/guide_recommenders.md.

    Attributes:
        mode: null: the plan places tables on the devices. `sync`: rows are looked up, the step runs, rows are written
            back, one after another. `pipelined`: look-ups and write-backs run beside steps, with the same results.
            `async`: as that, but rows may lack the updates of up to `max_staleness` steps. `auto`: which tables, which
            mode and how many workers follow from what plan.cluster tells of hosts.
        max_staleness: of `async`: steps whose updates a row may lack.
        may_be_stale: whether `auto` may choose `async`.
        hot_rows: by path of a table, how many of its most frequent rows stay on the devices; null for none. With
            plan.lookups.is_ranked these are the first, otherwise those of the first `sample_batches`. `auto` decides.
        may_keep_hot_rows: whether `auto` may choose hot rows.
        sample_batches: batches in which rows are counted.
        pooled: paths of tables whose rows are summed at the host, so that only sums are sent; null for none. In `sync`
            and `async`, not together with hot rows. `auto` decides.
        may_pool: whether `auto` may choose that.
        host_layers: paths of other parameters whose layers run at the host, right behind the rows that they read; null
            for none. With the limits of `pooled`. For `auto`: these and no others.
        may_run_layers: whether `auto` may choose that.
        tables: paths of the parameters that go to host memory; null for all tables. Not for `auto`.
        lazy: accept that an optimizer leaves rows as they are that a batch does not read, where it would change them
            otherwise: AdamW, momentum, weight decay.
        num_workers: processes that own the rows; null for half of the CPUs.
        prefetch: batches whose rows are looked up ahead of the step.
        timeout_s: a worker that does not answer for so long counts as lost.
        worker_cpus: numbers of the CPUs that look rows up; null for all.
    """

    mode: Literal["sync", "pipelined", "async", "auto"] | None = None
    max_staleness: NonNegativeInt = 2
    may_be_stale: bool = False
    hot_rows: dict[str, PositiveInt] | None = None
    may_keep_hot_rows: bool = False
    sample_batches: PositiveInt = 64
    pooled: list[str] | None = Field(default=None, min_length=1)
    may_pool: bool = False
    host_layers: list[str] | None = Field(default=None, min_length=1)
    may_run_layers: bool = False
    tables: list[str] | None = Field(default=None, min_length=1)
    lazy: bool = False
    num_workers: PositiveInt | None = None
    prefetch: PositiveInt = 2
    timeout_s: PositiveFloat = 60.0
    worker_cpus: list[NonNegativeInt] | None = Field(default=None, min_length=1)


class TrainConfig(_Section):
    """A whole training run.

    Attributes:
        model, optimizer, data, train, plan, stragglers, execution: see each section.
        devices: run on this many CPU devices; null for the machine's own accelerators.
        distributed: join the other processes of this run first, by `jax.distributed.initialize()`, which finds them
            under Slurm, Kubernetes, MPI and on Cloud TPUs.
    """

    model: ModelSection = Field(default_factory=ModelSection)
    optimizer: OptimizerSection = Field(default_factory=OptimizerSection)
    data: DataSection = Field(default_factory=DataSection)
    train: TrainSection = Field(default_factory=TrainSection)
    plan: PlanSection = Field(default_factory=PlanSection)
    stragglers: StragglersSection = Field(default_factory=StragglersSection)
    execution: ExecutionSection = Field(default_factory=ExecutionSection)
    devices: PositiveInt | None = None
    distributed: bool = False


_PATHS = (("plan", "cluster"), ("plan", "start"), ("data", "path"))


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainConfig:
    """Reads a training configuration.

    Args:
        path: the YAML file. Paths in it (`plan.cluster`, `plan.start`, `data.path`) are relative to its folder.
        overrides: `section.key=value` items that replace entries of the file; the value is read as YAML, and paths are
            relative to the working directory.

    Returns:
        The validated configuration, its paths absolute.

    Raises:
        FileFormatError: the file cannot be read as YAML.
        ConfigError: an override is malformed, or a key or a value is not valid; every fault found is listed.
    """
    shown = os.fsdecode(path)
    data = read_yaml(path)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise ConfigError(
            f"{shown}: a configuration is a mapping of sections; received {_shown(data)}. "
            f"Write sections such as {', '.join(TrainConfig.model_fields)}."
        )
    _anchor_paths(data, pathlib.Path(shown).parent)
    for item in overrides:
        _override(data, item)
    _anchor_paths(data, pathlib.Path())
    try:
        return TrainConfig.model_validate(data)
    except pydantic.ValidationError as error:
        faults = _explained(error, data)
        raise ConfigError("\n".join([f"{shown}: the configuration is not valid.", *faults])) from None


def config_of_text(text: str, origin: str) -> TrainConfig:
    """The configuration that a plan carries, written by `TrainConfig.model_dump_json`.

    Raises:
        ConfigError: it is not one, as when another version of autoshard wrote it.
    """
    try:
        return TrainConfig.model_validate_json(text)
    except pydantic.ValidationError as error:
        faults = _explained(error, None)
        raise ConfigError("\n".join([f"{origin}: the configuration in it is not valid here.", *faults])) from None


def _anchor_paths(data: dict[str, Any], folder: pathlib.Path) -> None:
    """Makes the paths in `data` absolute, taking relative ones from `folder`."""
    for section, key in _PATHS:
        entries = data.get(section)
        if isinstance(entries, dict) and isinstance(entries.get(key), str):
            entries[key] = os.path.abspath(folder / pathlib.Path(entries[key]).expanduser())


def _override(data: dict[str, Any], item: str) -> None:
    """Puts one `a.b=value` into `data`, making mappings on the way."""
    key, equals, text = item.partition("=")
    names = key.split(".")
    if not equals or not all(names):
        raise ConfigError(f"An override is written section.key=value; received {item!r}. Try: train.steps=100.")
    try:
        value = parse_yaml(text, f"override {item!r}")
    except FileFormatError as error:
        told, step, rest = str(error).partition("Correct the file.")
        quotes = "Correct the value, or put quotes around it." if step else ""
        raise ConfigError(f"{told}{quotes}{rest}") from error
    place = data
    for depth, name in enumerate(names[:-1]):
        if place.get(name) is None:
            place[name] = {}
        place = place[name]
        if not isinstance(place, dict):
            raise ConfigError(
                f"Override {item!r} names an entry of `{'.'.join(names[: depth + 1])}`, which is not a section "
                f"but {_shown(place)}. Override a key of a section instead."
            )
    place[names[-1]] = value


_RULES = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "a mapping of names to values",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "invalid_key": "named by text",
    "list_type": "a list",
    "model_type": "a mapping of names to values",
    "string_type": "text",
    "too_short": "a list that is not empty",
}
"""What a value must be, by the type of Pydantic's error."""


def _explained(error: pydantic.ValidationError, data: Any) -> list[str]:
    """A line for each key at fault: the key, the rules, what was received, and the next step.

    Args:
        error: what is wrong with the configuration.
        data: it as plain data, so that what Pydantic calls the members of a union is told from keys; or None.
    """
    lines: list[str] = []
    rules: dict[str, list[str]] = {}
    received: dict[str, str] = {}
    for fault in error.errors(include_url=False):
        location = fault["loc"] if data is None else _place(fault["loc"], data)
        key, kind = ".".join(map(str, location)), fault["type"]
        if kind == "extra_forbidden":
            valid = valid_names(str(location[-1]), _keys_at(location[:-1]))
            lines.append(f"  {key}: no such key; received {_shown(fault['input'])}.{valid}")
            continue
        rule = _RULES.get(kind) or fault["msg"].removeprefix("Input should be ")
        if kind == "value_error":  # of a validator here, which states its rule as a sentence
            lines.append(
                f"  {key}: {fault['msg'].removeprefix('Value error, ')}; received {_shown(fault['input'])}. Correct it."
            )
            continue
        own = rules.setdefault(key, [])
        if rule not in own:
            own.append(rule)
        received.setdefault(key, _shown(fault["input"]))
    for key, own in rules.items():
        rule = ", or ".join(own)
        lines.append(f"  {key}: must be {rule}; received {received[key]}. Correct the value or leave the key out.")
    return lines


def _place(location: Sequence[int | str], data: Any) -> tuple[int | str, ...]:
    """The keys in `location` that are those of `data`; Pydantic also names the members of unions there."""
    place: list[int | str] = []
    for part in location:
        if isinstance(data, dict) and part in data:
            data = data[part]
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        else:
            continue
        place.append(part)
    return tuple(place)


def _keys_at(location: Sequence[Any]) -> list[str]:
    model: type[BaseModel] = TrainConfig
    for part in location:
        if isinstance(part, int):
            continue  # an entry of a list, whose kind is known
        annotation = model.model_fields[part].annotation
        kinds = (*typing.get_args(annotation), annotation)
        model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel))
    return list(model.model_fields)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
