"""Products in pieces: which may run so, and what they take, by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from autoshard.cluster.device import Wires
from autoshard.cost.in_pieces import InPieces, may_run_in_pieces, transfers
from autoshard.graph.layout import WHOLE
from autoshard.planner.choices import choice_table

LAUNCH_S, HOP_S, LINK, MEMORY = 1e-6, 1e-6, 1e10, 1e11
"""Those of the test device and of its fast link (tests/conftest.py); bytes a second."""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.fixture(scope="module")
def formulation(formulated, mesh_of):
    """16 x 8 times 8 x 4 floats (512 B, 128 B, 256 B; 1024 flop) on two devices, on which nothing hides."""
    return formulated(lambda x, w: x @ w, (f32(16, 8), f32(8, 4)), mesh_of(2), decompose="any")


@pytest.fixture(scope="module")
def product(formulation):
    (table,) = formulation.tables
    return table


def in_pieces(table):
    return [k for k, c in enumerate(table.choices) if c.pieces is not None]


def test_either_operand_is_gathered_along_either_dimension_and_the_sum_scattered_onto_either(product):
    assert len(product.choices) == 6 + 6
    layouts = {tuple(c[k] for c in (*product.reads, *product.writes)) for k in in_pieces(product)}
    assert layouts == {
        ((0,), (1,), (1,)),  # rows of x are gathered: the axis splits columns
        ((1,), (1,), (1,)),  # what is summed, of x
        ((0,), (1,), (0,)),  # columns of w are gathered: the axis splits rows
        ((0,), (0,), (0,)),
        ((1,), (0,), (0,)),  # the sum is scattered
        ((1,), (0,), (1,)),
    }


@pytest.mark.parametrize(
    ("x", "w", "y", "moved_bytes", "beside_bytes", "launches", "piece_bytes", "kept_bytes"),
    [
        # each product reads half of x and all of w, and makes half of y, which is joined: read and written
        (0, 1, 1, 256 + 64 + 64, 2 * 128, 1, 256, 2 * 256 + 128),
        # each reads half of x and half of w, which is cut; the second reads the sum of the first as well
        (1, 1, 1, 256 + 32 + 1.5 * 128, 2 * 64, 1, 256, 2 * 256 + 64),
        # each reads half of x, which is cut, and all of w; both parts are read, and one piece written
        (1, 0, 0, 128 + 64 + 128, 2 * 256 + 256 + 128, 2, 128, 256 + 2 * 128),
        # each reads all of x and half of w, which is cut
        (1, 0, 1, 256 + 32 + 128, 2 * 64 + 256 + 128, 2, 128, 256 + 2 * 128),
    ],
)
def test_what_a_product_in_pieces_takes(product, x, w, y, moved_bytes, beside_bytes, launches, piece_bytes, kept_bytes):
    (row,) = (
        k for k in in_pieces(product) if tuple(c[k] for c in (*product.reads, *product.writes)) == ((x,), (w,), (y,))
    )
    kernels_s = 2 * (LAUNCH_S + moved_bytes / MEMORY) + launches * LAUNCH_S + beside_bytes / MEMORY
    assert product.compute_s[row] == pytest.approx(kernels_s)
    assert product.comm_s[row] == pytest.approx(HOP_S + piece_bytes / LINK + LAUNCH_S), (
        "a piece goes, and is waited for"
    )
    assert sum(c.wire_bytes for c in product.collectives[row]) == piece_bytes
    assert product.workspace_bytes[row] == kept_bytes
    assert product.partial_bytes[row] == 0
    assert product.flops[row] == 512


def test_of_a_transfer_counts_what_the_product_beside_it_does_not_hide(mesh_of):
    axis, device = mesh_of(4).axes[0], mesh_of(4).device_type
    one_s = LAUNCH_S + HOP_S + 1e5 / LINK  # 12 us
    waited = transfers(axis, device, 1e5, 5e-6, 0.0)
    assert (waited.time_s, waited.beside_s) == (pytest.approx(3 * one_s), 0.0)
    half = transfers(axis, device, 1e5, 8e-6, 0.5)
    assert (half.time_s, half.beside_s) == (pytest.approx(3 * (one_s - 4e-6)), pytest.approx(3 * 4e-6))
    hidden = transfers(axis, device, 1e5, 20e-6, 1.0)
    assert (hidden.time_s, hidden.beside_s) == (0.0, pytest.approx(3 * one_s))
    assert hidden.wire_bytes == 3e5 and hidden.count == 3


def test_only_what_is_faster_is_offered(formulated, formulation, mesh_of):
    """A large product hides its transfers; a small one pays launches for nothing."""
    (small,) = formulation.program.shapes
    (large,) = formulated(lambda x, w: x @ w, (f32(4096, 4096), f32(4096, 4096)), mesh_of(2)).program.shapes
    offered = lambda shape, *how: in_pieces(choice_table(shape, formulation.mesh, in_pieces=InPieces(*how)))
    assert len(offered(large, "faster", 1.0)) == 6
    assert not offered(large, "faster", 0.0), "where nothing runs beside products there is nothing to gain"
    assert not offered(small, "faster", 1.0)
    assert not offered(large, "never", 1.0)


def test_pieces_are_equal(formulated, mesh_of):
    """Of 6 rows and 5 columns four devices cannot each have a piece; of 8 summed they can, if x is gathered so."""
    (table,) = formulated(lambda x, w: x @ w, (f32(6, 8), f32(8, 4)), mesh_of(4), decompose="any").tables
    found = {tuple(c[k] for c in (*table.reads, *table.writes)) for k in in_pieces(table)}
    assert ((0,), (1,), (1,)) not in found and ((1,), (1,), (1,)) in found


def test_other_axes_split_other_dimensions(formulated, mesh_of):
    """A batch that a second axis splits stays split, of operands and result alike."""
    (table,) = formulated(
        lambda x, w: jnp.einsum("bsd,df->bsf", x, w), (f32(4, 8, 16), f32(16, 8)), mesh_of(2, 2), decompose="any"
    ).tables
    found = {tuple(c[k] for c in (*table.reads, *table.writes)) for k in in_pieces(table)}
    assert ((0, 1), (WHOLE, 1), (0, 2)) in found, "Megatron with sequence parallelism, before a product by columns"
    assert ((0, 2), (WHOLE, 0), (0, 1)) in found, "and behind one by rows"
    for k in in_pieces(table):
        choice = table.choices[k]
        assert choice.pieces.factor not in choice.assignment, "what travels is split by its axis alone"


def test_pieces_do_not_travel_in_a_torus(mesh_of):
    (axis,) = mesh_of(4).axes
    (level,) = axis.levels
    torus = dataclasses.replace(level, link=dataclasses.replace(level.link, wires=Wires.CLOSED))
    assert may_run_in_pieces(axis)
    assert not may_run_in_pieces(dataclasses.replace(axis, levels=(torus,)))
    assert not may_run_in_pieces(mesh_of(1).axes[0]), "and not to oneself"
