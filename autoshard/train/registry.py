"""The names that a configuration may use for data, and the whole program that a configuration describes.

A configuration selects from tables and never names an import path, so that reading a configuration from a stranger runs
no code of theirs.
"""

import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from autoshard_models.loss_scaling import LossScaling
from autoshard_models.train_step import StepOptions, TrainFunctions, build
from autoshard_models.zoo import FAMILIES, objective_of

from autoshard.annotations.block import Block, BlockKind
from autoshard.api import in_stages
from autoshard.errors import ConfigError
from autoshard.plans.make import load_cluster
from autoshard.trace.scoped_blocks import with_blocks
from autoshard.trace.trace import TracedOnce
from autoshard.train.config import AnnotationSection, TrainConfig
from autoshard.train.data import TrainData
from autoshard.train.data.batches import Batch, Batches, Examples, Part, drawn
from autoshard.train.data.clicks import click_batch
from autoshard.train.data.criteo import NUM_CATEGORIES, NUM_NUMBERS, criteo_batches
from autoshard.train.data.graphs import graph_batch
from autoshard.train.data.images import NUM_CLASSES, SIZE, digits, image_batches
from autoshard.train.data.language import MIN_PAIR_LENGTH, corrupted_length, corrupted_spans, masked_pairs, next_token
from autoshard.train.data.line_files import open_lines
from autoshard.train.data.text import part_of, python_sources, text_files
from autoshard.train.look_up import look_up
from autoshard.train.models import batch_config, model_config
from autoshard.train.optimizers import make_optimizer
from autoshard.train.shared_batch import uneven_step
from autoshard.train_step import TrainStep

# ---- data


def _python_sources(config: TrainConfig) -> TrainData:
    return _of_text(config, python_sources())


def _text(config: TrainConfig) -> TrainData:
    if config.data.path is None:
        raise ConfigError("data.path: `text` needs a file or a folder; received nothing. Set data.path.")
    return _of_text(config, text_files(config.data.path))


def _of_text(config: TrainConfig, corpus: np.ndarray) -> TrainData:
    """A corpus, uint8 (length,), as batches of the kind that the family learns from."""
    model, section, size = batch_config(config), config.data, config.data.batch_size
    draw: Callable[[np.ndarray, np.random.Generator, Examples], Batch]
    match config.model.name:
        case "encoder":
            length = num_tokens = model.context_length
            if length < MIN_PAIR_LENGTH:
                raise ConfigError(
                    f"data.sequence_length: a pair of pieces has at least {MIN_PAIR_LENGTH} tokens; received {length}. "
                    "Raise it."
                )
            draw = lambda corpus, rng, examples: masked_pairs(corpus, rng, size, num_tokens, model.vocab_size, examples)
        case "encoder_decoder":
            lengths = (model.input_length, model.target_length)
            length, num_tokens = corrupted_length(*lengths), sum(lengths)
            draw = lambda corpus, rng, examples: corrupted_spans(
                corpus, rng, size, *lengths, model.vocab_size, examples
            )
        case _:
            num_tokens = model.context_length
            length = num_tokens + 1
            draw = lambda corpus, rng, examples: next_token(corpus, rng, size, num_tokens, examples)

    def batches(part: Part) -> Batches:
        corpus_part = part_of(corpus, part, section.eval_fraction, length)
        return drawn(lambda rng, examples: draw(corpus_part, rng, examples), size, section.seed, part)

    return TrainData(batches("train"), batches("eval"), num_tokens, "tokens")


def _digits(config: TrainConfig) -> TrainData:
    model, section, is_labelled = batch_config(config), config.data, config.model.name != "unet"
    if model.image_size < SIZE:
        raise ConfigError(
            f"model.overrides.image_size: digits have {SIZE} pixels a side; received {model.image_size}. Raise it."
        )
    if is_labelled and model.num_classes < NUM_CLASSES:
        raise ConfigError(
            f"model.overrides.num_classes: there are {NUM_CLASSES} digits; received {model.num_classes}. Raise it."
        )
    data = digits()

    def batches(part: Part) -> Batches:
        return image_batches(
            data,
            part,
            batch_size=section.batch_size,
            seed=section.seed,
            eval_fraction=section.eval_fraction,
            image_size=model.image_size,
            num_channels=model.num_channels,
            is_labelled=is_labelled,
        )

    return TrainData(batches("train"), batches("eval"), 1, "images")


def _clicks(config: TrainConfig) -> TrainData:
    model, section = batch_config(config), config.data
    size = section.batch_size
    draw = lambda rng, examples: click_batch(
        rng, size, model.num_numbers, model.table_rows, examples, bag_sizes=model.bag_sizes
    )
    return TrainData(drawn(draw, size, section.seed, "train"), drawn(draw, size, section.seed, "eval"), 1, "clicks")


def _criteo(config: TrainConfig) -> TrainData:
    model, section = batch_config(config), config.data
    if section.path is None:
        raise ConfigError(
            "data.path: `criteo` needs a click log or a folder of them; received nothing. Set data.path; "
            "`autoshard clicks FILE` makes a log."
        )
    sizes = model.num_numbers, len(model.table_rows), sum(model.bag_sizes) or len(model.table_rows)
    if sizes != (NUM_NUMBERS, NUM_CATEGORIES, NUM_CATEGORIES):
        raise ConfigError(
            f"model.preset: a line of Criteo's logs has {NUM_NUMBERS} numbers and one id for each of {NUM_CATEGORIES} "
            f"tables; the model reads {sizes[0]} numbers and {sizes[2]} ids for {sizes[1]} tables. Choose "
            "model.preset=criteo_tiny or criteo, or other data."
        )
    log = open_lines(section.path)

    def batches(part: Part) -> Batches:
        return criteo_batches(
            log,
            part,
            batch_size=section.batch_size,
            seed=section.seed,
            eval_fraction=section.eval_fraction,
            table_rows=model.table_rows,
        )

    return TrainData(batches("train"), batches("eval"), 1, "clicks")


def _graphs(config: TrainConfig) -> TrainData:
    model, section = batch_config(config), config.data
    size = section.batch_size
    draw = lambda rng, examples: graph_batch(
        rng,
        size,
        num_nodes=model.num_nodes,
        num_edges=model.num_edges,
        node_features=model.node_features,
        edge_features=model.edge_features,
        num_targets=model.num_targets,
        examples=examples,
    )
    return TrainData(drawn(draw, size, section.seed, "train"), drawn(draw, size, section.seed, "eval"), 1, "graphs")


class Source(NamedTuple):
    """Data that a configuration may name: how they become batches, and the families that can learn from them."""

    load: Callable[[TrainConfig], TrainData]
    families: tuple[str, ...]


_LANGUAGE = ("gpt", "gpt_linen", "llama", "encoder", "encoder_decoder", "moe", "recurrent")
_VISION = ("vit", "vit_linen", "wide_resnet", "unet")

DATA: Mapping[str, Source] = MappingProxyType(
    {
        "python_sources": Source(_python_sources, _LANGUAGE),
        "text": Source(_text, _LANGUAGE),
        "digits": Source(_digits, _VISION),
        "clicks": Source(_clicks, ("dlrm",)),
        "criteo": Source(_criteo, ("dlrm",)),
        "graphs": Source(_graphs, ("graph_network",)),
    }
)
"""All data by name; the first that suits a family is its default."""

_READING_A_PATH = ("text", "criteo")


def load_data(config: TrainConfig) -> TrainData:
    """The batches that `config` asks for, to train and to evaluate on.

    Raises:
        ConfigError: no such data, none that suits the model, or none that can be read.
    """
    return DATA[_data_name(config)].load(config)


def _data_name(config: TrainConfig) -> str:
    """The name of the data that `config` asks for, after a check that they suit the model."""
    family, section = config.model.name, config.data
    suiting = [name for name, source in DATA.items() if family in source.families]
    name = section.name or suiting[0]
    if family not in look_up(DATA, "data.name", name).families:
        raise ConfigError(
            f"data.name: `{family}` cannot learn from {name!r}. Leave data.name out, or choose {' or '.join(suiting)}."
        )
    if section.path is not None and name not in _READING_A_PATH:
        readers = [reader for reader in suiting if reader in _READING_A_PATH]
        raise ConfigError(
            f"data.path: only {' and '.join(f'`{x}`' for x in _READING_A_PATH)} read a path, and the data are "
            f"`{name}`; received {section.path!r}. Leave it out"
            + (f", or set data.name to `{readers[0]}`." if readers else ".")
        )
    return name


# ---- a whole program


def train_functions(config: TrainConfig) -> TrainFunctions:
    """The functions of the run that `config` describes, in stages where it runs in stages.

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
        AutoshardError: the cluster cannot be read.
    """
    return functions_of(config, runs_in_stages(config))


def functions_of(config: TrainConfig, is_staged: bool) -> TrainFunctions:
    """The functions of a run, in stages or not. Errors are those of `train_functions`."""
    return staged_functions(config) if is_staged else whole_functions(config)


def runs_in_stages(config: TrainConfig) -> bool:
    """Whether the step of a run is cut into stages for certain; with `plan.pipelines: search` its plan tells, and the
    functions are the same.
    """
    return in_stages(load_cluster(config.plan.cluster), config.plan.stages, config.plan.pipelines)


def whole_functions(config: TrainConfig) -> TrainFunctions:
    """The functions of a run whose step is one program.

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
    """
    section, model = config.optimizer, model_config(config.model)
    batch_config(config)  # refuses what cannot be trained before anything is planned
    _data_name(config)
    _check_micro_batches(config)
    options = StepOptions(section.num_micro_batches, LossScaling() if section.loss_scaling else None)
    optimizer = make_optimizer(section, config.train.steps)
    try:
        functions = build(model, optimizer, options)
    except ValueError as error:
        raise ConfigError(f"model.overrides: the model cannot be built: {error} Change one of them.") from error
    functions = functions._replace(evaluate=TracedOnce(functions.evaluate))
    if config.stragglers.shares_batch:
        return functions._replace(step=uneven_step(config, _step_with_open_loss(config)))
    is_open = config.plan.remat == "search" or config.plan.micro_batches != "as_written"
    is_open |= config.plan.pipelines == "search"
    if is_open or config.plan.annotations or config.execution.mode is not None:
        return functions._replace(step=_step_with_open_loss(config))
    return functions._replace(step=TracedOnce(functions.step))


def staged_functions(config: TrainConfig) -> TrainFunctions:
    """The functions of a run whose step is cut into stages: `step` is an `autoshard.TrainStep`.

    Raises:
        ConfigError: an unknown name, or settings that contradict each other.
    """
    if config.stragglers.shares_batch:
        raise ConfigError(
            f"stragglers.parts: the stages of a step share a batch out as their plan says; received "
            f"{config.stragglers.parts}. Leave it out, or plan for devices of one kind without plan.stages."
        )
    init, _, evaluate = whole_functions(config)
    step, count = _train_step(config), config.optimizer.num_micro_batches
    if count > 1:
        step = step.in_parts((config.data.batch_size // count,) * count)
    return TrainFunctions(init, step, evaluate)


def _step_with_open_loss(config: TrainConfig) -> TrainStep:
    """The step as a loss and an optimizer, so that a planner can rewrite the loss."""
    count = config.optimizer.num_micro_batches
    if count != 1:
        raise ConfigError(
            "optimizer.num_micro_batches: plan.remat `search`, plan.micro_batches, plan.pipelines `search`, "
            "plan.annotations, execution.mode and stragglers.parts are for a batch in one part; received "
            f"{count}. Leave it out, or them."
        )
    return _train_step(config)


def _train_step(config: TrainConfig) -> TrainStep:
    section = config.optimizer
    objective = objective_of(model_config(config.model))

    def loss(params: Any, mutable: Any, batch: Mapping[str, jax.Array], key: jax.Array) -> Any:
        return objective.loss(params, mutable, batch, key if objective.is_random else None)

    if config.plan.annotations:
        loss = with_blocks(loss, [(a.scope, _block(n, a)) for n, a in enumerate(config.plan.annotations)])
    scaling = LossScaling() if section.loss_scaling else None
    return TrainStep(loss, make_optimizer(section, config.train.steps), has_mutable=True, scaling=scaling)


def _block(number: int, section: AnnotationSection) -> Block:
    """What an entry of `plan.annotations` asks for."""
    kind = BlockKind.SPLIT if section.replicate is None else BlockKind.REPLICATE
    dims = tuple(section.dims.items())
    line, degree = f"plan.annotations.{number}", section.split or section.replicate
    return Block(kind, line, (number,), degree, dims, section.colocate)


def _check_micro_batches(config: TrainConfig) -> None:
    count, batch_size = config.optimizer.num_micro_batches, config.data.batch_size
    if batch_size % count:
        raise ConfigError(
            f"optimizer.num_micro_batches: must divide data.batch_size; received {count} and {batch_size}. Change one."
        )
    if count > 1 and config.model.name == "graph_network":
        raise ConfigError(
            "optimizer.num_micro_batches: must be 1 for `graph_network`, whose batch is one joined graph; received "
            f"{count}. Leave it out and lower data.batch_size."
        )


def batch_shapes(config: TrainConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of the batches of `load_data(config)`, by name.

    Raises:
        ConfigError: an unknown name, or a length that does not fit the model.
    """
    return FAMILIES[config.model.name].batch_shapes(batch_config(config), config.data.batch_size)


def output_folder(config: TrainConfig) -> pathlib.Path:
    """The folder in which the run keeps its results, as an absolute path."""
    return pathlib.Path(config.train.output_dir).expanduser().resolve()
