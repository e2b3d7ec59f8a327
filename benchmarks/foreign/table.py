"""The programs, by name, and the mesh of H100s that each is planned on."""

import dataclasses
import functools
from collections.abc import Callable

from foreign import flax_models, language, various, vision
from foreign.common import Subject

EIGHT = (("data", 2), ("tensor", 4))
SIXTEEN = (("data", 2), ("tensor", 8))


@dataclasses.dataclass(frozen=True)
class Program:
    """A training step that none of the planner's rules were fitted to.

    Attributes:
      make: The step with its abstract arguments.
      style: What is particular about how it is written.
      mesh: Axes (name, size) that it is planned on; nodes have eight devices.
    """

    make: Callable[[], Subject]
    style: str
    mesh: tuple[tuple[str, int], ...] = EIGHT


PROGRAMS: dict[str, Program] = {
    "gpt8": Program(functools.partial(language.gpt, 8), "plain JAX, unrolled", SIXTEEN),
    "gpt2": Program(functools.partial(language.gpt, 2), "plain JAX, unrolled"),
    "gpt_scanned": Program(language.gpt_scanned, "plain JAX, scan and checkpoint", SIXTEEN),
    "llama_plain": Program(language.llama, "einsum, grouped queries, rotary; adamw, clipping, schedule"),
    "t5": Program(language.t5, "encoder and decoder, learned biases; adafactor"),
    "bert": Program(language.bert, "masked words, tied table with bias; lion"),
    "switch": Program(language.switch, "mixture of experts by one-hot dispatch; nesterov"),
    "vit_plain": Program(vision.vit, "vmapped heads, class token; multi_transform"),
    "mixer": Program(vision.mixer, "transposes by turns; Adam by hand"),
    "residual_network": Program(vision.residual_network, "convolutions, group norm; momentum by hand"),
    "denoiser": Program(vision.denoiser, "U-net, noise in the step, averaged weights; Adam by hand"),
    "autoencoder": Program(vision.autoencoder, "tuples of weights, float32; rmsprop"),
    "two_towers": Program(vision.two_towers, "contrastive over the batch; masked adamw"),
    "regression": Program(various.regression, "dense, float32; gradient descent"),
    "lstm": Program(various.lstm, "scan over time; clipped SGD"),
    "state_space": Program(various.state_space, "associative_scan, tied table; Adam by hand"),
    "factorisation": Program(various.factorisation, "two large tables; gradient descent"),
    "click_model": Program(various.click_model, "eight tables by jnp.take; adagrad"),
    "skip_gram": Program(various.skip_gram, "two tables, negative samples; Adam by hand"),
    "graph_convolution": Program(various.graph_convolution, "take and segment_sum; Adam by hand"),
    "radiance_field": Program(various.radiance_field, "cumprod along rays; adam"),
    "actor_critic": Program(various.actor_critic, "reverse scan, stop_gradient; clipped adam"),
    "perceiver": Program(various.perceiver, "einsum throughout; Adam by hand"),
    "wavenet": Program(various.wavenet, "dilated convolutions; adam and averaged updates"),
    "linen_decoder": Program(flax_models.linen_decoder, "Linen attention, Embed.attend; adamw"),
    "linen_scanned": Program(flax_models.linen_scanned, "Linen scan and remat; clipped adamw"),
    "linen_conv_net": Program(flax_models.linen_conv_net, "Linen BatchNorm in the state; nesterov"),
    "nnx_classifier": Program(flax_models.nnx_classifier, "NNX split and merge; adamw"),
    "nnx_perceptron": Program(flax_models.nnx_perceptron, "NNX split and merge; decayed momentum"),
}
