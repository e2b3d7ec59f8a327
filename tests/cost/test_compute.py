"""The roofline against figures derived by hand."""

import dataclasses

import pytest

from autoshard.cluster import AxisLevel, DeviceType, KernelForms, Link, MeshAxis
from autoshard.cost.collectives import launched, permute
from autoshard.cost.compute import Work, columns_s, flops_s, kernel_s, unaligned_factor

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


def test_convolutions_run_at_a_rate_of_their_own():
    """At the rate of products where nothing is said of them; else a quarter of the peak of 50e12 in TensorFloat-32."""
    seconds = lambda device, work, channels: flops_s(device, 1e12, "float32", work, least_dim=channels)
    for work in (Work.CONVOLUTION, Work.KERNEL_GRADIENT):
        assert seconds(DEVICE, work, 3) == pytest.approx(1 / 25)
    own = dataclasses.replace(DEVICE, convolution_efficiency=0.25)
    assert seconds(own, Work.CONVOLUTION, 16) == pytest.approx(1 / 12.5)  # 64 bytes
    assert seconds(own, Work.CONVOLUTION, 4) == pytest.approx(4 / 12.5)  # padded to four times as many
    assert seconds(own, Work.KERNEL_GRADIENT, 4) == pytest.approx(4 / 12.5 / 0.65)
    assert flops_s(own, 1e12, "bfloat16", Work.CONVOLUTION, least_dim=4) == pytest.approx(8 / 25)  # 8 of 64 bytes
    assert seconds(own, Work.PRODUCT, 4) == pytest.approx(1 / 25)


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory():
    assert kernel_s(DEVICE, 3e-3, 1e9, launches=1) == pytest.approx(2e-6 + 3e-3)
    assert kernel_s(DEVICE, 3e-3, 5e9, launches=1) == pytest.approx(2e-6 + 5e-3)
    assert kernel_s(DEVICE, 0.0, 0.0, launches=3) == pytest.approx(6e-6)
    half = dataclasses.replace(DEVICE, memory_efficiency=0.5)
    assert kernel_s(half, 3e-3, 5e9, launches=1) == pytest.approx(2e-6 + 10e-3)


def test_forms_of_kernels_prolong_them_where_they_were_measured():
    forms = KernelForms(row_pass_factor=1.5, column_step_s=1e-7, stored_column_step_s=1e-6, window_step_s=1e-8)
    own = dataclasses.replace(DEVICE, kernel_forms=forms)
    assert kernel_s(own, 3e-3, 4e9, launches=1, row_passes=2) == pytest.approx(2e-6 + 1.5**2 * 4e-3)
    assert kernel_s(DEVICE, 3e-3, 4e9, launches=1, row_passes=2) == pytest.approx(2e-6 + 4e-3)
    assert kernel_s(own, 3e-3, 4e9, launches=1, columns_s=7e-3) == pytest.approx(2e-6 + 7e-3)
    assert columns_s(own, 64, is_storing=False, window_additions=0) == pytest.approx(64e-7)
    assert columns_s(own, 64, is_storing=True, window_additions=3) == pytest.approx(64 * (1e-6 + 3e-8))
    assert columns_s(DEVICE, 64, is_storing=True, window_additions=3) == 0


def test_what_rows_add_to_a_large_kernel_grows_with_the_root_of_its_bytes():
    """Up to 1e9 bytes 1.5 x 1.5 times the bytes' time; of 4e9, that adds 1.25 / 2 of it. Per kernel, not together."""
    forms = KernelForms(1.5, 1e-7, 1e-6, 1e-8, row_pass_bytes=1e9)
    own = dataclasses.replace(DEVICE, kernel_forms=forms)
    assert kernel_s(own, 0.0, 1e9, launches=1, row_passes=2) == pytest.approx(2e-6 + 2.25e-3)
    assert kernel_s(own, 0.0, 4e9, launches=1, row_passes=2) == pytest.approx(2e-6 + (1 + 1.25 / 2) * 4e-3)
    assert kernel_s(own, 0.0, 4e9, launches=4, row_passes=2) == pytest.approx(8e-6 + 2.25 * 4e-3)
    assert kernel_s(own, 0.0, 4e9, launches=1) == pytest.approx(2e-6 + 4e-3)


def test_rows_that_begin_at_no_multiple_of_16_bytes_prolong_a_product():
    """Of bfloat16, 8 elements are 16 bytes; of float32, 4. Rows of no more than that do not count."""
    forms = KernelForms(1.5, 1e-7, 1e-6, 1e-8, unaligned_factor=1.25, unaligned_sum_factor=2.5)
    own = dataclasses.replace(DEVICE, kernel_forms=forms)
    aligned, odd, odd_sum = (1024, False), (1023, False), (1023, True)
    assert unaligned_factor(own, "bfloat16", [aligned, aligned, (8, True)]) == 1
    assert unaligned_factor(own, "bfloat16", [aligned, odd, aligned]) == 1.25
    assert unaligned_factor(own, "bfloat16", [odd, odd_sum, aligned]) == 2.5
    assert (
        unaligned_factor(own, "bfloat16", [(1020, True)]) == 2.5
        and unaligned_factor(own, "float32", [(1020, True)]) == 1
    )
    assert unaligned_factor(own, "bfloat16", [(3, True)]) == 1
    assert unaligned_factor(DEVICE, "bfloat16", [odd_sum]) == 1


def test_a_collective_is_launched_like_any_kernel():
    axis = MeshAxis("a", 2, (AxisLevel(2, Link(1e-6, 1e9, 0, "test")),))
    bare = permute([axis], 1e3)
    assert launched(bare, DEVICE).time_s == pytest.approx(2e-6 + bare.time_s) == pytest.approx(2e-6 + 1e-6 + 1e-6)
