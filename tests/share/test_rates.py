"""Footprints and rates: text, limits, interpolation."""

import pytest
from examples import MIXED

from autoshard.errors import ShareError
from autoshard.share.footprint import Footprint, Part, cluster_of, read_footprint, usual_footprints
from autoshard.share.rates import Rate, Rates, Source, with_interpolated


def rates(**given):
    return Rates(tuple(Rate(read_footprint(at.replace("_", ":")), rate) for at, rate in given.items()))


@pytest.mark.parametrize("text", ["v100:4", "v100:2x8", "v100:8+p100:2x8"])
def test_a_footprint_is_read_as_it_is_written(text):
    assert str(read_footprint(text)) == text


def test_devices_of_a_footprint():
    footprint = read_footprint("v100:2x8+p100:4")
    assert footprint.parts == (Part("v100", 2, 8), Part("p100", 1, 4)) and footprint.num_devices == 20


@pytest.mark.parametrize("text", ["v100", "v100:0", "v100:2x", ":4", "v100:4+v100:8", "v100:1.5"])
def test_what_is_no_footprint_is_refused(text):
    with pytest.raises(ShareError, match=r"received '.*Try|each group once"):
        read_footprint(text)


def test_the_usual_sizes_are_powers_of_two_within_a_node_and_whole_nodes():
    found = [str(f) for f in usual_footprints(MIXED, 2, 24, groups=["v100"])]
    assert found == ["v100:2", "v100:4", "v100:8", "v100:2x8"]  # 4x8 is too many
    cut = [str(f) for f in usual_footprints(MIXED, 4, 8, groups=["v100"], cuts_nodes=True)]
    assert cut == ["v100:4", "v100:8", "v100:2x2", "v100:2x4", "v100:4x1", "v100:4x2"]
    mixed = [str(f) for f in usual_footprints(MIXED, 16, 16, is_mixed=True)]
    assert mixed == ["v100:2x8", "p100:2x8", "v100:8+p100:8"]


def test_the_cluster_of_a_footprint_has_its_devices_and_links():
    part = cluster_of(read_footprint("v100:2x8+p100:4"), MIXED)
    assert [(g.name, g.num_nodes, g.devices_per_node) for g in part.groups] == [("v100", 2, 8), ("p100", 1, 4)]
    assert part.groups[0].inter_node == MIXED.groups[0].inter_node and part.between_groups == MIXED.between_groups
    one = cluster_of(read_footprint("p100:1"), MIXED)
    assert one.num_devices == 1 and one.between_groups is None and one.groups[0].inter_node is None


@pytest.mark.parametrize(
    ("text", "what"), [("a100:1", "no group 'a100', but v100, p100"), ("v100:5x8", "has 4 nodes of 8")]
)
def test_a_footprint_that_the_cluster_does_not_have_is_refused(text, what):
    with pytest.raises(ShareError, match=what):
        cluster_of(read_footprint(text), MIXED)


def test_between_two_sizes_lies_the_power_law_through_them():
    # from 2 to 8 devices three times as fast: 3 = 4^p; at 4 devices the rate is 5 * sqrt(3)
    known = rates(v100_2=5.0, v100_8=15.0)
    found = with_interpolated(known, [read_footprint("v100:4")])
    added = next(rate for rate in found.entries if rate.source is Source.INTERPOLATED)
    assert added.steps_per_s == pytest.approx(5.0 * 3.0**0.5)


@pytest.mark.parametrize("text", ["v100:1", "v100:16", "p100:4", "v100:2x2", "v100:2+p100:2"])
def test_nothing_is_added_outside_of_what_is_known(text):
    known = rates(v100_2=5.0, v100_8=15.0)
    assert with_interpolated(known, [read_footprint(text)]) == known


def test_whole_nodes_lie_between_whole_nodes():
    known = Rates((Rate(read_footprint("v100:8"), 10.0), Rate(read_footprint("v100:4x8"), 40.0)))
    assert with_interpolated(known, [read_footprint("v100:2x8")]).of(read_footprint("v100:2x8")) == pytest.approx(20.0)


def test_the_exponent_is_that_of_a_power_law():
    known = Rates(tuple(Rate(Footprint((Part("a", 1, k),)), 3.0 * k**0.7) for k in (1, 2, 4, 8)))
    assert known.exponent == pytest.approx(0.7) and known.unit_rate == pytest.approx(3.0)
