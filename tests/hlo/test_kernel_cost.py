"""What single instructions of compiled programs move and take, against figures derived by hand."""

import dataclasses
import textwrap

import pytest

from autoshard.cluster import DeviceType, KernelForms
from autoshard.hlo.flops import product_flops
from autoshard.hlo.kernel_cost import kernel_bytes, kernel_s
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
    kernel_forms=KernelForms(row_pass_factor=1.5, column_step_s=1e-7, stored_column_step_s=1e-6, window_step_s=1e-8),
    product_workspace_bytes=32 * 2**20,
)


def module_of(entry: str, *others: str) -> HloModule:
    computations = [textwrap.dedent(c).strip() for c in (*others, entry)]
    return parse("HloModule test, is_scheduled=true\n\n" + "\n\n".join(computations) + "\n")


def root_bytes(module: HloModule) -> float:
    entry = module.computations[module.entry]
    return kernel_bytes(module, entry, entry.instructions[entry.root])


def root_s(device: DeviceType, module: HloModule) -> float:
    entry = module.computations[module.entry]
    return kernel_s(device, module, entry, entry.instructions[entry.root])


ADD = """
    %add (x: f32[], y: f32[]) -> f32[] {
      %x = f32[] parameter(0)
      %y = f32[] parameter(1)
      ROOT %z = f32[] add(%x, %y)
    }"""


def test_a_look_up_reads_the_rows_that_it_takes_whatever_is_computed_on_the_way():
    """A table of 1000 rows of 64 in float32 is rounded, 8 rows are looked up, and their squares are summed: 8 rows are
    read, and 8 ids; 8 rows of bfloat16 and 8 sums are written.
    """
    fused = """
        %fused (t: f32[1000,64], ids: s32[8,1]) -> (f32[8], bf16[8,64]) {
          %t = f32[1000,64]{1,0} parameter(0)
          %ids = s32[8,1]{1,0} parameter(1)
          %rounded = bf16[1000,64]{1,0} convert(%t)
          %rows = bf16[8,64]{1,0} gather(%rounded, %ids), offset_dims={1}, collapsed_slice_dims={0}, slice_sizes={1,64}
          %exact = f32[8,64]{1,0} convert(%rows)
          %squares = f32[8,64]{1,0} multiply(%exact, %exact)
          %zero = f32[] constant(0)
          %sums = f32[8]{0} reduce(%squares, %zero), dimensions={1}, to_apply=%add
          ROOT %out = (f32[8]{0}, bf16[8,64]{1,0}) tuple(%sums, %rows)
        }"""
    entry = """
        ENTRY %main (t: f32[1000,64], ids: s32[8,1]) -> (f32[8], bf16[8,64]) {
          %t = f32[1000,64]{1,0} parameter(0)
          %ids = s32[8,1]{1,0} parameter(1)
          ROOT %f = (f32[8]{0}, bf16[8,64]{1,0}) fusion(%t, %ids), kind=kInput, calls=%fused
        }"""
    assert root_bytes(module_of(entry, ADD, fused)) == 8 * 64 * 4 + 8 * 4 + 8 * 4 + 8 * 64 * 2


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_scatter_changes_only_the_rows_that_it_adds_to(is_fused):
    """8 rows of 64 and their ids are read; 8 rows of the table are read and written."""
    head = "(t: f32[1000,64], ids: s32[8,1], rows: f32[8,64]) -> f32[1000,64]"
    given = """
          %t = f32[1000,64]{1,0} parameter(0)
          %ids = s32[8,1]{1,0} parameter(1)
          %rows = f32[8,64]{1,0} parameter(2)"""
    scatter = """
          ROOT %s = f32[1000,64]{1,0} scatter(%t, %ids, %rows), update_window_dims={1}, inserted_window_dims={0}, \
scatter_dims_to_operand_dims={0}, index_vector_dim=1, to_apply=%add
        }"""
    fusion = """
          ROOT %f = f32[1000,64]{1,0} fusion(%t, %ids, %rows), kind=kInput, calls=%fused
        }"""
    if is_fused:
        module = module_of(
            f"""
        ENTRY %main {head} {{{given}{fusion}""",
            ADD,
            f"""
        %fused {head} {{{given}{scatter}""",
        )
    else:
        module = module_of(
            f"""
        ENTRY %main {head} {{{given}{scatter}""",
            ADD,
        )
    assert root_bytes(module) == 8 * 64 * 4 + 8 * 4 + 2 * 8 * 64 * 4


def test_slices_of_one_operand_are_read_once_each():
    """Two quarters of 1000 floats, one of which is negated first, and multiplied: 500 are read and 250 written. What is
    also read whole, is read whole.
    """
    fused = """
        %fused (p: f32[1000]) -> f32[250] {
          %p = f32[1000]{0} parameter(0)
          %n = f32[1000]{0} negate(%p)
          %a = f32[250]{0} slice(%n), slice={[0:250]}
          %b = f32[250]{0} slice(%p), slice={[250:500]}
          ROOT %m = f32[250]{0} multiply(%a, %b)
        }"""
    entry = """
        ENTRY %main (p: f32[1000]) -> f32[250] {
          %p = f32[1000]{0} parameter(0)
          ROOT %f = f32[250]{0} fusion(%p), kind=kLoop, calls=%fused
        }"""
    assert root_bytes(module_of(entry, fused)) == 4 * (500 + 250)
    summed = fused.replace(
        "ROOT %m = f32[250]{0} multiply(%a, %b)",
        "%zero = f32[] constant(0)\n"
        "          %sum = f32[] reduce(%p, %zero), dimensions={0}, to_apply=%add\n"
        "          %all = f32[250]{0} broadcast(%sum), dimensions={}\n"
        "          %m = f32[250]{0} multiply(%a, %b)\n"
        "          ROOT %o = f32[250]{0} multiply(%m, %all)",
    )
    assert root_bytes(module_of(entry, ADD, summed)) == 4 * (1000 + 250)


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


def softmax(row: int, taken: str = "exponential", kind: str = "__triton", is_returned: bool = True) -> HloModule:
    """Of 4096 rows, or the sums of their exponentials alone."""
    whole, out = f"f32[4096,{row}]{{1,0}}", f"f32[4096,{row}]" if is_returned else "f32[4096]"
    last = (
        f"""%sums = {whole} broadcast(%sum), dimensions={{0}}
          ROOT %q = {whole} divide(%e, %sums)"""
        if is_returned
        else "ROOT %q = f32[4096]{0} copy(%sum)"
    )
    fused = f"""
        %fused (x: f32[4096,{row}]) -> {out} {{
          %x = {whole} parameter(0)
          %low = f32[] constant(-inf)
          %most = f32[4096]{{0}} reduce(%x, %low), dimensions={{1}}, to_apply=%add
          %mosts = {whole} broadcast(%most), dimensions={{0}}
          %less = {whole} subtract(%x, %mosts)
          %e = {whole} {taken}(%less)
          %zero = f32[] constant(0)
          %sum = f32[4096]{{0}} reduce(%e, %zero), dimensions={{1}}, to_apply=%add
          {last}
        }}"""
    entry = f"""
        ENTRY %main (x: f32[4096,{row}]) -> {out} {{
          %x = {whole} parameter(0)
          ROOT %f = {out} fusion(%x), kind=kCustom, calls=%fused, \
backend_config={{"fusion_backend_config":{{"kind":"{kind}"}}}}
        }}"""
    return module_of(entry, ADD, fused)


def test_reductions_that_wait_for_each_other_prolong_a_softmax_of_long_rows():
    """Two reductions, of maximum and sum: 1.5 x 1.5 of the time for reading and writing 4096 rows of 512 floats, at
    1e12 bytes a second, also where only the sums are written. Rows of 256, what takes no exponentials, and kernels that
    are not Triton's take the time of their bytes.
    """
    whole_s = lambda row: 2 * 4096 * row * 4 / 1e12
    assert root_s(GPU, softmax(512)) == pytest.approx(1e-6 + 1.5**2 * whole_s(512))
    assert root_s(GPU, softmax(512, is_returned=False)) == pytest.approx(
        1e-6 + 1.5**2 * (4096 * 512 * 4 + 4096 * 4) / 1e12
    )
    assert root_s(GPU, softmax(256)) == pytest.approx(1e-6 + whole_s(256))
    assert root_s(GPU, softmax(512, taken="negate")) == pytest.approx(1e-6 + whole_s(512))
    assert root_s(GPU, softmax(512, kind="__custom")) == pytest.approx(1e-6 + whole_s(512))
    plain = dataclasses.replace(GPU, kernel_forms=None)
    assert root_s(plain, softmax(512)) == pytest.approx(1e-6 + whole_s(512))


def test_a_larger_softmax_waits_less():
    """16 MB are read and written: with 4 MB up to which the factor holds, it adds half as much."""
    forms = dataclasses.replace(GPU.kernel_forms, row_pass_bytes=4096 * 512 * 4 / 2)
    own = dataclasses.replace(GPU, kernel_forms=forms)
    assert root_s(own, softmax(512)) == pytest.approx(1e-6 + (1 + 1.25 / 2) * 2 * 4096 * 512 * 4 / 1e12)


def product(left: str, right: str, out: str, dims: str) -> HloModule:
    """A product of two matrices of bfloat16, given as sizes and layouts."""
    entry = f"""
        ENTRY %main (x: bf16[4096,4096], y: bf16[4096,4096]) -> bf16[4096,4096] {{
          %x = bf16{left} parameter(0)
          %y = bf16{right} parameter(1)
          ROOT %z = bf16{out} dot(%x, %y), {dims}
        }}"""
    return module_of(entry)


@pytest.mark.parametrize(
    ("left", "right", "out", "dims", "factor"),
    [
        ("[4096,4096]{1,0}", "[4096,4096]{1,0}", "[4096,4096]{1,0}", (1, 0), 1.0),
        ("[4096,4095]{1,0}", "[4095,4096]{1,0}", "[4096,4096]{1,0}", (1, 0), 3.0),  # summed along rows of the first
        ("[4096,4095]{0,1}", "[4095,4096]{1,0}", "[4096,4096]{1,0}", (1, 0), 1.0),  # whose columns lie together
        ("[4096,4095]{0,1}", "[4095,4096]{0,1}", "[4096,4096]{1,0}", (1, 0), 3.0),  # along columns of the second
        ("[4096,4096]{1,0}", "[4096,4095]{1,0}", "[4096,4095]{1,0}", (1, 0), 1.5),
        ("[4095,4096]{1,0}", "[4096,4096]{1,0}", "[4095,4096]{1,0}", (1, 0), 1.0),
        ("[4095,4096]{1,0}", "[4096,4096]{1,0}", "[4095,4096]{0,1}", (1, 0), 1.5),
    ],
)
def test_a_product_whose_rows_are_not_aligned_takes_longer(left, right, out, dims, factor):
    """4,095 elements of bfloat16 are no multiple of 16 bytes; what counts is how they lie in memory."""
    forms = dataclasses.replace(GPU.kernel_forms, unaligned_factor=1.5, unaligned_sum_factor=3.0)
    own = dataclasses.replace(GPU, kernel_forms=forms)
    written = f"lhs_contracting_dims={{{dims[0]}}}, rhs_contracting_dims={{{dims[1]}}}"
    module = product(left, right, out, written)
    assert root_s(own, module) == pytest.approx(1e-6 + factor * product_flops(module) / (0.8 * 8e12))
    assert root_s(GPU, module) == pytest.approx(1e-6 + product_flops(module) / (0.8 * 8e12))


@pytest.mark.parametrize(
    ("kind", "out", "permutation", "is_slow"),
    [
        ("kLoop", "[64,512,4]{2,1,0}", "{0,2,1}", True),
        ("kInput", "[64,512,4]{2,1,0}", "{0,2,1}", False),  # tile by tile
        ("kLoop", "[64,512,4]{1,2,0}", "{0,2,1}", False),  # it lies as before
        ("kLoop", "[4,64,512]{2,1,0}", "{1,0,2}", False),  # whole rows are moved
    ],
)
def test_short_rows_of_what_lies_otherwise_take_longer_than_their_bytes(kind, out, permutation, is_slow):
    """64 x 4 x 512 floats, read and written."""
    forms = dataclasses.replace(GPU.kernel_forms, short_rows_factor=4.0)
    own = dataclasses.replace(GPU, kernel_forms=forms)
    fused = f"""
        %fused (x: f32[64,4,512]) -> f32[] {{
          %x = f32[64,4,512]{{2,1,0}} parameter(0)
          %n = f32[64,4,512]{{2,1,0}} negate(%x)
          ROOT %t = f32{out} transpose(%n), dimensions={permutation}
        }}"""
    entry = f"""
        ENTRY %main (x: f32[64,4,512]) -> f32[] {{
          %x = f32[64,4,512]{{2,1,0}} parameter(0)
          ROOT %f = f32{out} fusion(%x), kind={kind}, calls=%fused
        }}"""
    module = module_of(entry, fused)
    assert root_s(own, module) == pytest.approx(1e-6 + (4 if is_slow else 1) * 2 * 64 * 4 * 512 * 4 / 1e12)


def column_sums(rows: int, root: str, out: str) -> HloModule:
    """The sums of columns of 64 floats, and what else `root` returns."""
    fused = f"""
        %fused (x: f32[{rows},64]) -> {out} {{
          %x = f32[{rows},64]{{1,0}} parameter(0)
          %zero = f32[] constant(0)
          %n = f32[{rows},64]{{1,0}} negate(%x)
          %four = f32[{rows},64]{{1,0}} reduce-window(%n, %zero), window={{size=4x1 pad=3_0x0_0}}, to_apply=%add
          %sums = f32[64]{{0}} reduce(%n, %zero), dimensions={{0}}, to_apply=%add
          %row_sums = f32[{rows}]{{0}} reduce(%n, %zero), dimensions={{1}}, to_apply=%add
          ROOT %r = {out} {root}
        }}"""
    entry = f"""
        ENTRY %main (x: f32[{rows},64]) -> {out} {{
          %x = f32[{rows},64]{{1,0}} parameter(0)
          ROOT %f = {out} fusion(%x), kind=kInput, calls=%fused
        }}"""
    return module_of(entry, ADD, fused)


def test_a_thread_sums_a_column_step_by_step():
    """2000 rows, 32 at once: 63 steps of 0.1 us, or of 1 us where the elements are stored as well, and 10 ns for each
    of the four additions of a window. All longer than the bytes: 512 kB, at 1e12 a second. Sums of rows need no steps.
    """
    seconds = lambda root, out, rows=2000: root_s(GPU, column_sums(rows, root, out))
    assert seconds("bitcast(%sums)", "f32[64]") == pytest.approx(1e-6 + 63 * 1e-7)
    assert seconds("tuple(%sums, %n)", "(f32[64], f32[2000,64])") == pytest.approx(1e-6 + 63 * 1e-6)
    windows = seconds("tuple(%sums, %four)", "(f32[64], f32[2000,64])")
    assert windows == pytest.approx(1e-6 + 63 * (1e-6 + 4 * 1e-8))
    assert seconds("bitcast(%row_sums)", "f32[2000]") == pytest.approx(1e-6 + (2000 * 64 + 2000) * 4 / 1e12)
    few_s = seconds("tuple(%sums, %n)", "(f32[64], f32[32,64])", rows=32)
    assert few_s == pytest.approx(1e-6 + (2 * 32 * 64 + 64) * 4 / 1e12)


ATTENTION = """
        ENTRY %main (q: bf16[2,64,8,16], k: bf16[2,64,4,16], v: bf16[2,64,4,16]) -> bf16[2,8,64,16] {
          %q = bf16[2,64,8,16]{3,2,1,0} parameter(0)
          %k = bf16[2,64,4,16]{3,2,1,0} parameter(1)
          %v = bf16[2,64,4,16]{3,2,1,0} parameter(2)
          ROOT %a = (bf16[2,8,64,16]{3,1,2,0}, f32[2,8,64]{2,1,0}, u8[0]{0}) custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"fmha_scale": 0.25, "intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "8", "64", "64"], "tuple_shapes": []}, "mask_type": "MASK", "sliding_window_length": WINDOW, "max_seg_per_batch": 1}}
        }"""  # noqa: E501 - as XLA writes it


@pytest.mark.parametrize(
    ("mask", "window", "pairs"),
    [("NO_MASK", 0, 64 * 64), ("CAUSAL", 0, 64 * 65 / 2), ("CAUSAL", 8, 8 * 9 / 2 + 56 * 8)],
)
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_fused_attention_computes_what_its_mask_leaves(mask, window, pairs, is_backward):
    """Two products of 2 x 8 heads forward, five backward, at 0.52 and 0.5 of the peak. Moving takes less: 2 x 64 x 16
    elements of eight heads of queries and four of keys and of values are read, those of eight heads and a float32 for
    each row written.
    """
    text = ATTENTION.replace('"MASK"', f'"{mask}"').replace("WINDOW", str(window))
    module = module_of(text.replace("fmhaSoftmax", "fmhaSoftmaxBackward") if is_backward else text)
    flops = (5 if is_backward else 2) * 2 * 2 * 8 * pairs * 16
    assert product_flops(module) == flops
    moved_bytes = 2 * 64 * 16 * 2 * (8 + 4 + 4 + 8) + 2 * 8 * 64 * 4
    assert root_bytes(module) == moved_bytes
    slow = dataclasses.replace(GPU, peak_flops_per_s={"float32": 1e9, "bfloat16": 1e9})
    assert root_s(slow, module) == pytest.approx(1e-6 + flops / (1e9 * (0.5 if is_backward else 0.52)))


@pytest.mark.parametrize(
    "target", ["fmhaSoftmaxBackward", "fmhaScaleBiasSoftmaxDropoutBackward", "fmhaSoftmaxBackwardF8"]
)
def test_every_backward_pass_of_fused_attention_has_five_products(target):
    text = ATTENTION.replace('"MASK"', '"NO_MASK"').replace("WINDOW", "0").replace("fmhaSoftmax", target)
    assert product_flops(module_of(text)) == 5 * 2 * 2 * 8 * 64 * 64 * 16
