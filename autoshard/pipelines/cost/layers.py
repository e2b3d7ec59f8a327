"""The layers of a model as the stage search sees them: an order in which to cut, what crosses each cut, who shares."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Activation:
    """A value that one layer makes and later ones read; it is sent where a cut lies between.

    Attributes:
      source: The layer that makes it. readers: The later layers that read it, ascending.
      example_bytes: Bytes for each example of a micro-batch (all bytes, if `is_shared`).
      is_shared: Whether its size does not depend on the batch.
      has_gradient: Whether a gradient of the same size comes back from each stage that reads it.
    """

    source: int
    readers: tuple[int, ...]
    example_bytes: float
    is_shared: bool = False
    has_gradient: bool = True


@dataclasses.dataclass(frozen=True, slots=True)
class SharedWeight:
    """A parameter that several layers read: its readers (ascending), and its bytes."""

    readers: tuple[int, ...]
    size_bytes: float


@dataclasses.dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model, in the order in which they run.

    Attributes:
      kinds: For each layer, its kind: layers of one kind are equal programs and cost the same.
      names: For people, such as `embedding`, `block 3`.
      activations: Values that may have to be sent between stages.
      shared_weights: Parameters that several layers read.
    """

    kinds: tuple[int, ...]
    names: tuple[str, ...]
    activations: tuple[Activation, ...]
    shared_weights: tuple[SharedWeight, ...] = ()

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.kinds)
