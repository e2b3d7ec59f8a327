"""The roofline against figures derived by hand."""

import pytest

from autoshard.cluster import AxisLevel, DeviceType, Link, MeshAxis
from autoshard.cost.collectives import launched, permute
from autoshard.cost.compute import Work, flops_s, kernel_s

DEVICE = DeviceType(
    "test",
    {"float32": 10e12, "bfloat16": 100e12, "tensorfloat32": 50e12},
    memory_bytes=10**9,
    memory_bandwidth_bytes_per_s=1e12,
    launch_overhead_s=2e-6,
    source="test",
    matmul_efficiency=0.5,
)


def test_products_run_on_the_matrix_units():
    assert flops_s(DEVICE, 1e12, "bfloat16", Work.PRODUCT) == pytest.approx(20e-3)
    assert flops_s(DEVICE, 1e12, "float32", Work.PRODUCT) == pytest.approx(40e-3)
    assert flops_s(DEVICE, 1e12, "float32", Work.OTHER) == pytest.approx(100e-3)
    assert flops_s(DEVICE, 0.0, "float32", Work.OTHER) == 0


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    assert kernel_s(DEVICE, 3e-3, 1e9, launches=1) == pytest.approx(2e-6 + 3e-3)
    assert kernel_s(DEVICE, 3e-3, 5e9, launches=1) == pytest.approx(2e-6 + 5e-3)
    assert kernel_s(DEVICE, 0.0, 0.0, launches=3) == pytest.approx(6e-6)


def test_a_collective_is_launched_like_any_kernel():
    axis = MeshAxis("a", 2, (AxisLevel(2, Link(1e-6, 1e9, 0, "test")),))
    bare = permute([axis], 1e3)
    assert launched(bare, DEVICE).time_s == pytest.approx(2e-6 + bare.time_s) == pytest.approx(2e-6 + 1e-6 + 1e-6)
