"""What single instructions of compiled programs move and take, against figures derived by hand."""

import textwrap

import pytest

from autoshard.cluster import DeviceType
from autoshard.hlo.kernel_cost import kernel_s
from autoshard.hlo.module import HloModule, parse

GPU = DeviceType(
    "gpu",
    {"float32": 1e12, "tensorfloat32": 4e12, "bfloat16": 8e12},
    80 * 10**9,
    1e12,
    1e-6,
    "made for this test",
    matmul_efficiency=0.8,
    convolution_efficiency=0.5,
    product_workspace_bytes=32 * 2**20,
)


def module_of(entry: str, *others: str) -> HloModule:
    computations = [textwrap.dedent(c).strip() for c in (*others, entry)]
    return parse("HloModule test, is_scheduled=true\n\n" + "\n\n".join(computations) + "\n")


def root_s(device: DeviceType, module: HloModule) -> float:
    entry = module.computations[module.entry]
    return kernel_s(device, module, entry, entry.instructions[entry.root])


def convolution(target: str, channels: int) -> HloModule:
    """Of 8 images of 32 x 32 with a kernel of 3 x 3 to 64 features, or one of its gradients."""
    image, kernel, out = f"f32[8,32,32,{channels}]", f"f32[64,3,3,{channels}]", "f32[8,30,30,64]"
    first, second, made = {
        "Forward": (image, kernel, out),
        "BackwardInput": (out, kernel, image),
        "BackwardFilter": (image, out, kernel),
    }[target]
    return module_of(f"""
        ENTRY %main (a: {first}, b: {second}) -> {made} {{
          %a = {first}{{3,2,1,0}} parameter(0)
          %b = {second}{{3,2,1,0}} parameter(1)
          ROOT %c = ({made}{{3,2,1,0}}, u8[1000]{{0}}) custom-call(%a, %b), window={{size=3x3}}, \
dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{target}"
        }}""")


def test_convolutions_take_what_their_direction_and_their_channels_say():
    """2 x (8 x 30 x 30 x 64) x (3 x 3 x channels) operations, at half of 4e12 a second; four channels of float32 take
    the place of 16; the gradient of a kernel runs at 0.65 of the rate.
    """
    wide_s, narrow_s = (2 * 8 * 30 * 30 * 64 * 9 * channels / 2e12 for channels in (32, 4))
    assert root_s(GPU, convolution("Forward", 32)) == pytest.approx(1e-6 + wide_s)
    assert root_s(GPU, convolution("BackwardInput", 32)) == pytest.approx(1e-6 + wide_s)
    assert root_s(GPU, convolution("BackwardFilter", 32)) == pytest.approx(1e-6 + wide_s / 0.65)
    assert root_s(GPU, convolution("Forward", 4)) == pytest.approx(1e-6 + 4 * narrow_s)
    assert root_s(GPU, convolution("BackwardFilter", 4)) == pytest.approx(1e-6 + 4 * narrow_s / 0.65)
