"""Collectives with a product between begin and end, in programs of XLA:GPU and XLA:TPU written by hand."""

import textwrap

import pytest

from autoshard.hlo.beside_products import beside_products
from autoshard.hlo.module import parse

AXES = (("data", 8),)
GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"
DOT = "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
GATHER = "(f32[8,8], f32[64,8]) all-gather-start(%p), channel_id=1, " + GROUPS


def found(body: str, others: str = "") -> frozenset[str]:
    entry = "ENTRY %main (p: f32[8,8]) -> f32[64,8] {\n" + textwrap.indent(textwrap.dedent(body), "  ") + "}\n"
    return beside_products(parse(f"HloModule test, is_scheduled=true\n\n{textwrap.dedent(others)}\n{entry}"), AXES)


@pytest.mark.parametrize(
    ("between", "gather", "expected"),
    [
        (f"dot(%p, %p), {DOT}", GATHER, {"g"}),
        ("add(%p, %p)", GATHER, set()),
        ("fusion(%p), kind=kCustom, calls=%inside", GATHER, {"g"}),
        (f"dot(%p, %p), {DOT}", GATHER + ', backend_config={"is_sync":true}', set()),
    ],
)
def test_what_stands_between_begin_and_end_decides(between, gather, expected):
    others = f"""\
        %inside (q: f32[8,8]) -> f32[8,8] {{
          %q = f32[8,8] parameter(0)
          ROOT %e = f32[8,8] dot(%q, %q), {DOT}
        }}
    """
    body = f"""\
        %p = f32[8,8] parameter(0)
        %early = f32[8,8] dot(%p, %p), {DOT}
        %g = {gather}
        %d = f32[8,8] {between}
        %whole = f32[64,8] all-gather-done(%g)
        ROOT %late = f32[8,8] dot(%p, %p), {DOT}
    """
    assert found(body, others) == expected


def test_xla_tpu_repeats_a_collective_in_the_fusions_that_it_runs_beside():
    """One runs beside a fusion with a product; another, in a single fusion with its product, beside nothing."""
    others = f"""\
        %start (q: f32[8,8]) -> f32[64,8] {{
          %q = f32[8,8] parameter(0)
          ROOT %a = f32[64,8] all-gather(%q), channel_id=1, {GROUPS}
        }}

        %beside (q: f32[8,8]) -> f32[8,8] {{
          %q = f32[8,8] parameter(0)
          %b = f32[64,8] all-gather(%q), channel_id=1, {GROUPS}
          ROOT %e = f32[8,8] convolution(%q, %q), dim_labels=bf_io->bf
        }}

        %alone (q: f32[8,8]) -> f32[64,8] {{
          %q = f32[8,8] parameter(0)
          %f = f32[8,8] convolution(%q, %q), dim_labels=bf_io->bf
          ROOT %c = f32[64,8] all-gather(%f), channel_id=2, {GROUPS}
        }}
    """
    body = """\
        %p = f32[8,8] parameter(0)
        %s = f32[64,8] fusion(%p), kind=kCustom, calls=%start
        %t = f32[8,8] fusion(%p), kind=kCustom, calls=%beside
        ROOT %u = f32[64,8] fusion(%t), kind=kCustom, calls=%alone
    """
    assert found(body, others) == {"a"}
