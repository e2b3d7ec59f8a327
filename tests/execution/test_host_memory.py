"""What this JAX cannot compile is refused before XLA does so in words of its own."""

import jax
import pytest

from autoshard.errors import MissingExtraError
from autoshard.execution import placement


@pytest.mark.parametrize(
    ("version", "num_devices", "is_refused"),
    [((0, 10, 1), 2, True), ((0, 10, 1), 1, False), ((0, 10, 2), 2, False), ((0, 12, 0), 2, False)],
)
def test_values_in_the_memory_of_the_host_need_a_later_jax_on_several_devices(
    monkeypatch, version, num_devices, is_refused
):
    monkeypatch.setattr(placement, "jax_version", lambda: version)
    mesh = jax.make_mesh((num_devices,), ("data",), devices=jax.devices()[:num_devices])
    if not is_refused:
        placement.refuse_host_memory(mesh)
        return
    with pytest.raises(MissingExtraError, match=r"needs JAX 0\.10\.2 .* this is 0\.10\.1.*offload=\"never\""):
        placement.refuse_host_memory(mesh)
