"""The choices of single operations: a matrix product by hand, and laws for operations of every form."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.cluster import (
    Calibration,
    CollectiveKind,
    Curve,
    KernelForms,
    LogicalMesh,
    MeasuredCollective,
    MeasuredRates,
)
from autoshard.graph.layout import WHOLE, fits
from autoshard.planner.choices import satisfies


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def row_of(table, *layouts):
    """The choice with the given layouts of its reads and writes."""
    columns = (*table.reads, *table.writes)
    found = [k for k in range(len(table.choices)) if tuple(c[k] for c in columns) == layouts]
    assert len(found) == 1
    return found[0]


@pytest.fixture(scope="module")
def product(formulated, mesh_of):
    """16 x 8 times 8 x 4 floats (512 B, 128 B, 256 B; 1024 flop) on two devices."""
    (table,) = formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 4)), mesh_of(2)).tables
    return table


def test_a_matrix_product_has_six_strategies(product):
    assert len(product.choices) == 6


@pytest.mark.parametrize(
    ("x", "w", "y", "moved_bytes", "comm_s", "partial_bytes"),
    [
        (WHOLE, WHOLE, WHOLE, 512 + 128 + 256, 0.0, 0),
        (0, WHOLE, 0, 256 + 128 + 128, 0.0, 0),  # split rows
        (WHOLE, 1, 1, 512 + 64 + 128, 0.0, 0),  # split columns
        # split the contracted dimension: two passes of a ring of two, 128 B each, and a launch
        (1, 0, WHOLE, 256 + 64 + 256, 2 * (1e-6 + 128 / 1e10) + 1e-6, 0),
        # or one pass, which leaves the sum in pieces while the partial result of 256 B is still there
        (1, 0, 0, 256 + 64 + 256, 1e-6 + 128 / 1e10 + 1e-6, 256),
        (1, 0, 1, 256 + 64 + 256, 1e-6 + 128 / 1e10 + 1e-6, 256),
    ],
)
def test_strategies_of_a_matrix_product(product, x, w, y, moved_bytes, comm_s, partial_bytes):
    row = row_of(product, (x,), (w,), (y,))
    split = 1 if (x, w) == (WHOLE, WHOLE) else 2
    assert product.flops[row] == 1024 / split
    assert product.compute_s[row] == pytest.approx(1e-6 + moved_bytes / 1e11), "bound by memory, after a launch"
    assert product.comm_s[row] == pytest.approx(comm_s)
    assert product.partial_bytes[row] == partial_bytes


@pytest.fixture
def on_measured(mesh_of):
    """Two devices that take a second for 1e9 transposed bytes, and for 5e8 bytes of which pieces are put in order."""
    one = Curve(((1.0, 1e12),))
    rates = MeasuredRates(
        Calibration("2026-01-31", "0.10.2", "test", 0.0),
        (("float32", one),),
        Curve(((1.0, 1.0),)),
        Curve(((1.0, 1e11),)),
        1e12,
        1e12,
        transposed_bytes_per_s=Curve(((1.0, 1e9),)),
    )
    mesh = mesh_of(2)
    (level,) = mesh.axes[0].levels
    scatter = MeasuredCollective(CollectiveKind.REDUCE_SCATTER, 2, 1e-6, 1e10, inner_bytes_per_s=5e8)
    link = dataclasses.replace(level.link, collectives=(scatter,))
    axis = dataclasses.replace(mesh.axes[0], levels=(dataclasses.replace(level, link=link),))
    return LogicalMesh((axis,), dataclasses.replace(mesh.device_type, measured=rates))


def test_sums_scattered_along_inner_dimensions_are_put_in_order(formulated, on_measured):
    (table,) = formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 4)), on_measured).tables
    outer, inner = (row_of(table, (1,), (0,), (dim,)) for dim in (0, 1))
    assert table.comm_s[outer] == pytest.approx(1e-6 + 128 / 1e10 + 1e-6)
    assert table.comm_s[inner] - table.comm_s[outer] == pytest.approx(256 / 5e8), "the partial sum of 256 B"


def test_transpositions_take_time_where_it_was_measured(formulated, on_measured):
    """16 x 8 floats; a change of order that only moves a dimension of one element is none."""
    times = lambda fn: formulated(fn, (f32(16, 8),), on_measured).tables[0].compute_s
    whole_s, half_s = 512 / 1e9, 256 / 1e9
    extra_s = times(lambda x: 2 * x.T) - times(lambda x: 2 * x)
    assert sorted(extra_s) == pytest.approx([half_s, half_s, whole_s])
    unmoved_s = times(lambda x: 2 * x[:, None].transpose(1, 0, 2)) - times(lambda x: 2 * x)
    assert unmoved_s == pytest.approx(0, abs=1e-12)


INDICES_BYTES, ROWS_BYTES = 32 * 4, 32 * 16 * 4


@pytest.mark.parametrize(
    ("table", "result", "moved_bytes"),
    [
        (WHOLE, WHOLE, INDICES_BYTES + 2 * ROWS_BYTES),  # the rows that are taken are read and written
        (1, 1, INDICES_BYTES + ROWS_BYTES),  # half of each
        (0, WHOLE, INDICES_BYTES + 2 * ROWS_BYTES),  # half of the table: all are taken there, half of them in vain
    ],
)
def test_a_gather_reads_of_its_table_what_it_takes(formulated, mesh_of, table, result, moved_bytes):
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    look_up = lambda table, ids: table.at[ids].get(mode="promise_in_bounds")
    *_, gather = formulated(look_up, (f32(4096, 16), ids), mesh_of(2)).tables
    row = row_of(gather, (table,), (WHOLE,), (result,))
    assert gather.compute_s[row] == pytest.approx(1e-6 + moved_bytes / 1e11)


def test_a_scatter_changes_its_table_where_it_is(formulated, mesh_of):
    """Updates are read, the rows that they change read and written; a table made of zeros is written first."""
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    add = lambda table, ids, rows: table.at[ids].add(rows, mode="promise_in_bounds")
    *_, scatter = formulated(add, (f32(4096, 16), ids, f32(32, 16)), mesh_of(2)).tables
    row = row_of(scatter, (WHOLE,), (WHOLE,), (WHOLE,), (WHOLE,))
    assert scatter.compute_s[row] == pytest.approx(1e-6 + (INDICES_BYTES + 3 * ROWS_BYTES) / 1e11)
    *_, scatter = formulated(
        lambda ids, rows: add(jnp.zeros((4096, 16)), ids, rows), (ids, f32(32, 16)), mesh_of(2)
    ).tables
    moved_bytes = INDICES_BYTES + 3 * ROWS_BYTES + 4096 * 16 * 4
    whole = [set(c.assignment) == {WHOLE} for c in scatter.choices].index(True)
    assert scatter.compute_s[whole] == pytest.approx(1e-6 + moved_bytes / 1e11)


def test_what_is_scattered_into_the_value_that_it_is_added_to_needs_no_zeros(formulated, mesh_of):
    """As the gradient of a table into its momentum, unless it is summed over devices between: half the ids on each of
    two add to zeros, which are written first."""
    ids = jax.ShapeDtypeStruct((32,), jnp.int32)
    add = lambda ids, rows, m: 0.9 * m + jnp.zeros((4096, 16)).at[ids].add(rows, mode="promise_in_bounds")
    f = formulated(add, (ids, f32(32, 16), f32(4096, 16)), mesh_of(2), donate=(2,))
    (scatter,) = [
        table
        for table, group in zip(f.tables, f.program.groups, strict=True)
        if f.program.graph.operations[group.operations[0]].name == "scatter-add"
    ]
    whole = [set(c.assignment) == {WHOLE} for c in scatter.choices].index(True)
    assert scatter.compute_s[whole] == pytest.approx(1e-6 + (INDICES_BYTES + 3 * ROWS_BYTES) / 1e11)
    by_ids = row_of(scatter, (0,), (0,), (WHOLE,))
    moved_bytes = (INDICES_BYTES + 3 * ROWS_BYTES) / 2 + 4096 * 16 * 4
    assert scatter.compute_s[by_ids] == pytest.approx(1e-6 + moved_bytes / 1e11)


@pytest.mark.parametrize(
    ("held", "kinds"),
    [
        ((0, 0), ["reduce-scatter"]),
        ((0, WHOLE), ["all-reduce"]),  # not a reduce-scatter over a and an all-reduce over b
        ((0, 1), ["all-reduce"]),
        ((WHOLE, WHOLE), ["all-reduce"]),
    ],
)
def test_a_scatter_is_summed_over_all_axes_at_once(formulated, mesh_of, held, kinds):
    """Rows split over both axes are added into a table that is held in pieces along the axes in `held`."""
    ids, rows = jax.ShapeDtypeStruct((64,), jnp.int32), f32(64, 16)
    add = lambda rows, ids: jnp.zeros((32, 16)).at[ids].add(rows, mode="promise_in_bounds")
    f = formulated(add, (rows, ids), mesh_of(2, 4))
    table = f.tables[-1]
    found = [
        table.collectives[k]
        for k in range(len(table.choices))
        if table.writes[-1][k] == held and (0, 0) in [column[k] for column in table.reads]
    ]
    (collectives,) = {tuple((c.kind.value, c.axes) for c in steps) for steps in found}
    assert [kind for kind, _ in collectives] == kinds
    assert {axis for _, axes in collectives for axis in axes} == {"a", "b"}


def test_two_axes_on_a_product(formulated, mesh_of):
    """Rows over one axis, the contracted dimension over the other: 512 B of the result are reduced on half of it."""
    (table,) = formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 8)), mesh_of(2, 2)).tables
    row = row_of(table, (0, 1), (WHOLE, 0), (0, WHOLE))
    (step,) = table.collectives[row]
    assert (step.kind.value, step.axes) == ("all-reduce", ("b",))
    assert step.wire_bytes == 2 * 0.5 * 256
    assert table.flops[row] == 2 * 16 * 8 * 8 / 4


def test_both_axes_on_the_contracted_dimension(formulated, mesh_of):
    """One axis scattered, the other reduced: the reduction works on the scattered piece."""
    (table,) = formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 8)), mesh_of(2, 2)).tables
    row = row_of(table, (1, 1), (0, 0), (WHOLE, 0))
    scatter, reduce = table.collectives[row]
    assert (scatter.kind.value, scatter.axes, scatter.wire_bytes) == ("reduce-scatter", ("b",), 256)
    assert (reduce.kind.value, reduce.axes, reduce.wire_bytes) == ("all-reduce", ("a",), 2 * 0.5 * 256)


def test_maxima_cannot_be_scattered(formulated, mesh_of):
    (table,) = formulated(lambda x: x.max(0), (f32(8, 8),), mesh_of(2)).tables
    assert {w for w, r in zip(table.writes[0], table.reads[0], strict=True) if r == (0,)} == {(WHOLE,)}


def test_an_axis_of_one_device_changes_no_price(formulated, mesh_of):
    (wide,) = formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 4)), mesh_of(1, 2)).tables
    (narrow,) = formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 4)), mesh_of(2)).tables
    price = lambda table, k: (float(table.compute_s[k]), float(table.comm_s[k]))
    assert {price(wide, k) for k in range(len(wide.choices))} == {price(narrow, k) for k in range(len(narrow.choices))}


def test_convolutions_are_priced_by_direction_and_channels(formulated, mesh_of):
    """8 images of 32 x 32 with a kernel of 5 x 5, at half of 1e12 operations a second: four channels of float32 take
    the time of 16, and gradients of kernels run at 0.65 of the rate.
    """
    mesh = mesh_of(2)
    mesh = dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, convolution_efficiency=0.5))
    conv = lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID")

    def whole_s(fn, channels):
        x, k = f32(8, channels, 32, 32), f32(64, channels, 5, 5)
        f = formulated(fn, (x, k, f32(8, 64, 28, 28)), mesh)
        ((table, shape),) = [
            (t, s) for t, s in zip(f.tables, f.program.shapes, strict=True) if any(k.flops > 1e6 for k in s.kernels)
        ]
        (row,) = [k for k, c in enumerate(table.choices) if set(c.assignment) == {WHOLE}]
        return table.compute_s[row] - shape.launches * 1e-6

    gradient = lambda x, k, y: jax.linear_transpose(lambda k: conv(x, k), k)(y)
    once_s = 2 * (8 * 64 * 28 * 28) * (5 * 5) / 0.5e12  # of one channel
    assert whole_s(lambda x, k, y: conv(x, k), 32) == pytest.approx(32 * once_s)
    assert whole_s(lambda x, k, y: conv(x, k), 4) == pytest.approx(16 * once_s)
    assert whole_s(gradient, 32) == pytest.approx(32 * once_s / 0.65)
    assert whole_s(gradient, 4) == pytest.approx(16 * once_s / 0.65)


@pytest.mark.parametrize("is_gpu", [True, False])
def test_the_gradient_of_a_kernel_is_scattered_as_it_lies_onto_output_channels_alone(formulated, mesh_of, is_gpu):
    """64 output channels, 32 of input, 5 x 5: cuDNN has the first outermost. Onto any other dimension it is turned
    around before it is scattered: read and written at 1e11 bytes a second, one launch."""
    mesh = mesh_of(2)
    workspace = dataclasses.replace(mesh.device_type, product_workspace_bytes=2**20)
    mesh = dataclasses.replace(mesh, device_type=workspace) if is_gpu else mesh
    assert mesh.device_type.is_gpu == is_gpu
    kernel = f32(64, 32, 5, 5)
    gradient = lambda x, y: jax.linear_transpose(lambda k: jax.lax.conv(x, k, (1, 1), "VALID"), kernel)(y)[0]
    f = formulated(gradient, (f32(8, 32, 32, 32), f32(8, 64, 28, 28)), mesh)
    (table,) = [t for t, s in zip(f.tables, f.program.shapes, strict=True) if any(k.flops > 1e6 for k in s.kernels)]
    scattered_s = {c.scatter[0]: table.compute_s[k] for k, c in enumerate(table.choices) if c.scatter[0] != WHOLE}
    (whole_s,) = {
        table.compute_s[k]
        for k, c in enumerate(table.choices)
        if c.scatter[0] == WHOLE and f.program.shapes[0].factors[c.assignment[0]].reduction and table.comm_s[k]
    }
    assert scattered_s.keys() == {0, 1}
    assert scattered_s[0] == pytest.approx(whole_s)
    turned_s = 1e-6 + 2 * (4 * 64 * 32 * 5 * 5) / 1e11
    assert scattered_s[1] - whole_s == pytest.approx(turned_s if is_gpu else 0.0)


def on_forms(mesh):
    """1.5 times as long for each pass over long rows; a step down a column takes 1 us."""
    forms = KernelForms(row_pass_factor=1.5, column_step_s=1e-6, stored_column_step_s=1e-5, window_step_s=1e-8)
    return dataclasses.replace(mesh, device_type=dataclasses.replace(mesh.device_type, kernel_forms=forms))


def test_a_softmax_over_long_rows_takes_longer_than_its_bytes(formulated, mesh_of):
    """8 x 512 floats are read and written at 1e11 bytes a second, 1.5 x 1.5 times as long; without forms, once."""
    softmax = lambda x: jax.nn.softmax(x, axis=-1)
    for mesh, factor in ((mesh_of(2), 1.0), (on_forms(mesh_of(2)), 1.5**2)):
        f = formulated(softmax, (f32(8, 512),), mesh)
        (table,) = [t for t, s in zip(f.tables, f.program.shapes, strict=True) if s.launches]
        (whole,) = [k for k, c in enumerate(table.choices) if set(c.assignment) == {WHOLE}]
        assert table.compute_s[whole] == pytest.approx(1e-6 + factor * 2 * 8 * 512 * 4 / 1e11)


def test_a_product_is_prolonged_where_its_rows_are_not_aligned_on_a_device(formulated, mesh_of):
    """Rows of 8 floats begin at multiples of 16 bytes, and so do halves of them; of 4, halves do not. The first product
    sums along its rows, the second makes them.
    """
    forms = KernelForms(1.0, 0.0, 0.0, 0.0, unaligned_factor=2, unaligned_sum_factor=5)
    mesh = dataclasses.replace(mesh_of(2), device_type=dataclasses.replace(mesh_of(2).device_type, kernel_forms=forms))
    whole = lambda rows, columns, inner: 2.0 * rows * columns * inner / 1e12

    def factors(fn, shapes, flops_s):
        """Of the product whole, and of each way to split it."""
        (table,) = formulated(fn, tuple(f32(*s) for s in shapes), mesh).tables
        found = {}
        for c, s in zip(table.choices, table.compute_s, strict=True):
            ways = 1 if set(c.assignment) == {WHOLE} else 2
            found[c.assignment] = round((s - 1e-6) / (flops_s / ways), 6)
        return sorted(found.values())

    rows = columns = 4096
    summed = lambda inner: factors(
        lambda x, y: jnp.einsum("ik,jk->ij", x, y), [(rows, inner), (columns, inner)], whole(rows, columns, inner)
    )
    assert summed(8192) == [1, 1, 1, 1]
    assert summed(8200) == [1, 1, 1, 1]
    assert summed(8196) == [1, 1, 1, 5]  # halves of its rows
    assert summed(8197) == [5, 5, 5]
    made = lambda columns: factors(jnp.matmul, [(rows, 8192), (8192, columns)], whole(rows, columns, 8192))
    assert made(4096) == [1, 1, 1, 1] and made(4100) == [1, 1, 1, 2] and made(4101) == [2, 2, 2]


def test_columns_are_summed_step_by_step_on_each_device(formulated, mesh_of):
    """960 rows are 30 steps, and 15 where two devices have half of them each. 2048 are summed in two kernels, the first
    of 256 rows at most, as are 1024 on each of two devices. More than 4096 rows are summed in parts by the compiler,
    which takes the time of the bytes. Whether the rows' own sums take long, their bytes decide.
    """
    total = lambda x: x.sum(0)
    price = lambda rows, fn, mesh: formulated(fn, (f32(rows, 4),), mesh).tables[0]
    table = price(960, total, on_forms(mesh_of(2)))
    assert table.compute_s[row_of(table, (WHOLE,), (WHOLE,))] == pytest.approx(1e-6 + 30e-6)
    assert table.compute_s[row_of(table, (0,), (WHOLE,))] == pytest.approx(1e-6 + 15e-6)
    assert table.compute_s[row_of(table, (1,), (0,))] == pytest.approx(1e-6 + 30e-6)
    staged = price(2048, total, on_forms(mesh_of(2)))
    assert staged.compute_s[row_of(staged, (WHOLE,), (WHOLE,))] == pytest.approx(2 * 1e-6 + 8e-6)
    assert staged.compute_s[row_of(staged, (0,), (WHOLE,))] == pytest.approx(2 * 1e-6 + 8e-6)
    long = price(8192, total, on_forms(mesh_of(2)))
    assert long.compute_s[row_of(long, (WHOLE,), (WHOLE,))] == pytest.approx(1e-6 + (8192 * 4 + 4) * 4 / 1e11)
    assert long.compute_s[row_of(long, (0,), (WHOLE,))] == pytest.approx(2 * 1e-6 + 8e-6)
    rows = price(2048, lambda x: x.sum(1), on_forms(mesh_of(2)))
    assert rows.compute_s[row_of(rows, (WHOLE,), (WHOLE,))] == pytest.approx(1e-6 + (2048 * 4 + 2048) * 4 / 1e11)
    plain = price(2048, total, mesh_of(2))
    assert plain.compute_s[row_of(plain, (WHOLE,), (WHOLE,))] == pytest.approx(1e-6 + (2048 * 4 + 4) * 4 / 1e11)


OPERATIONS = {
    "elementwise": (lambda x, y: jnp.sin(x) * y + 1, (f32(8, 8), f32(8, 8))),
    "batched": (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (f32(4, 8, 4, 2), f32(4, 8, 4, 2))),
    "merged": (lambda x: jnp.cos(x).reshape(32, 4).reshape(8, 16), (f32(8, 4, 4),)),
    "softmax": (jax.nn.softmax, (f32(8, 8),)),
    "gather": (lambda t, i: t[i], (f32(16, 8), jax.ShapeDtypeStruct((8,), jnp.int32))),
    "sum": (lambda x: x.sum(), (f32(8, 8),)),
    "odd": (lambda x, w: jnp.tanh(x @ w), (f32(6, 8), f32(8, 3))),
    "partial_sums": (lambda x, y, v, w: x @ v + y @ w, (f32(8, 4), f32(8, 4), f32(4, 8), f32(4, 8))),
    "gradient": (jax.grad(lambda w, x: (jnp.tanh(x @ w) ** 2).sum()), (f32(8, 8), f32(4, 8))),
}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("sizes", [(4,), (2, 4)])
def test_laws_of_choices(name, sizes, formulated, mesh_of):
    f = formulated(*OPERATIONS[name], mesh_of(*sizes))
    for table, shape in zip(f.tables, f.program.shapes, strict=True):
        columns = (*table.reads, *table.writes)
        rows = list(zip(*columns, strict=True)) if columns else []
        assert len(set(rows)) == len(rows) == len(table.choices), "no two choices look the same from outside"
        for column, (_, _, extents) in zip(columns, (*shape.reads, *shape.writes), strict=True):
            assert all(fits(layout, extents, sizes) for layout in column)
        whole = [k for k, c in enumerate(table.choices) if set(c.assignment) == {WHOLE}]
        assert len(whole) == 1
        assert table.collectives[whole[0]] == ()
        for k, choice in enumerate(table.choices):
            parts = math.prod(n for n, f in zip(sizes, choice.assignment, strict=True) if f != WHOLE)
            assert table.flops[k] >= table.flops[whole[0]] / parts - 1e-9
            is_exchanged = bool(choice.exchanged)  # finds duplicates of ids besides
            assert table.compute_s[k] <= table.compute_s[whole[0]] + 1e-12 or is_exchanged
            assert is_exchanged == (table.exchanges[k] is not None) == (table.workspace_bytes[k] > 0)
            assert is_exchanged == any(c.kind is CollectiveKind.ALL_TO_ALL for c in table.collectives[k])
            sums = any(f != WHOLE and shape.factors[f].reduction is not None for f in choice.assignment)
            assert (sums or is_exchanged) == bool(table.collectives[k])
        assert np.isfinite(table.compute_s).all() and (table.compute_s >= 0).all() and (table.partial_bytes >= 0).all()


def test_all_legal_splits_of_one_elementwise_operation(formulated, mesh_of):
    """Two dimensions of 8 on axes of 2 and 4: every map of axes to dimensions that divides, and no other."""
    (table,) = formulated(lambda x: x * 2, (f32(8, 4),), mesh_of(2, 4)).tables
    expected = {l for l in itertools.product((WHOLE, 0, 1), repeat=2) if fits(l, (8, 4), (2, 4))}
    assert set(table.reads[0]) == set(table.writes[0]) == expected


def test_demands_compare_axes_on_each_dimension():
    names = ("a", "b", "c")
    assert satisfies((0, 0, 1), (("a", "b"), ("c",)), names)
    assert satisfies((0, 0, 1), (("b", "a"), None), names)
    assert not satisfies((0, WHOLE, 1), (("a", "b"), ("c",)), names)
    assert not satisfies((0, WHOLE, WHOLE), ((), None), names)
    assert satisfies((WHOLE, WHOLE, 1), ((), None), names)
