"""Which slots the next generation uses, and in which order."""

from autoshard.launch.engines.protocol import Slot
from autoshard.launch.membership import Membership, with_ranks_kept

SLOTS = tuple(Slot(number, "here", "/memory") for number in range(4))


def numbers(slots):
    return [slot.number for slot in slots]


def test_a_lost_slot_is_left_alone_for_a_while_where_the_size_may_change():
    members = Membership(2, 4, rejoin_after_s=30.0)
    members.lost(1, 100.0)
    assert numbers(members.usable(SLOTS)) == [0, 2, 3]
    assert numbers(members.joined(SLOTS, 129.0)) == []
    assert numbers(members.joined(SLOTS, 130.0)) == [1]
    assert numbers(members.joined(SLOTS, 131.0)) == []
    assert numbers(members.usable(SLOTS)) == [0, 1, 2, 3]


def test_a_slot_whose_time_is_over_before_anyone_looks_joins_all_the_same():
    """As on a busy machine, where processes take longer to start than the slot is left alone."""
    members = Membership(2, 4, rejoin_after_s=0.5)
    assert numbers(members.joined(SLOTS, 100.0)) == []
    members.lost(1, 100.0)
    assert numbers(members.usable(SLOTS)) == [0, 2, 3]
    assert numbers(members.joined(SLOTS, 103.0)) == [1]
    assert numbers(members.joined(SLOTS, 104.0)) == []


def test_slots_of_lost_and_new_hosts_come_and_go():
    members = Membership(1, 4, rejoin_after_s=30.0)
    assert numbers(members.joined(SLOTS[:2], 100.0)) == []
    members.lost(1, 100.0)  # and its host is gone
    assert numbers(members.joined(SLOTS[:1], 131.0)) == []
    assert numbers(members.joined((SLOTS[0], SLOTS[3]), 140.0)) == [3]
    assert numbers(members.joined(SLOTS[:2], 150.0)) == [1]
    members.lost(0, 150.0)
    assert numbers(members.joined(SLOTS[:2], 160.0)) == []
    assert members.recall() and numbers(members.joined(SLOTS[:2], 160.0)) == []


def test_a_lost_slot_is_used_again_at_once_where_the_size_is_fixed():
    members = Membership(4, 4, rejoin_after_s=30.0)
    members.lost(1, 100.0)
    assert numbers(members.usable(SLOTS)) == [0, 1, 2, 3]


def test_slots_that_wait_are_called_back_where_too_few_are_left():
    members = Membership(3, 4, rejoin_after_s=30.0)
    members.lost(1, 100.0)
    members.lost(2, 100.0)
    assert not members.is_enough(members.usable(SLOTS))
    assert members.recall() and not members.recall()
    assert members.is_enough(members.usable(SLOTS))


def test_the_user_s_number_counts_and_may_be_below_the_least():
    members = Membership(3, 4, rejoin_after_s=30.0)
    members.want(2)
    assert numbers(members.usable(SLOTS)) == [0, 1]
    assert members.is_enough(members.usable(SLOTS))


def test_a_slot_that_is_left_out_stays_out():
    members = Membership(2, 4, rejoin_after_s=30.0)
    members.exclude(0)
    members.want(4)
    assert numbers(members.usable(SLOTS)) == [1, 2, 3]


def test_no_more_slots_can_be_spared_than_the_run_needs():
    members = Membership(2, 4, rejoin_after_s=30.0)
    assert members.can_spare(0, SLOTS) and members.can_spare(0, SLOTS[:3])
    members.exclude(0)
    assert members.can_spare(1, SLOTS) and not members.can_spare(1, SLOTS[:3])


def test_as_many_as_possible_keep_their_rank():
    assert numbers(with_ranks_kept((SLOTS[0], SLOTS[2], SLOTS[3]), {0: 0, 1: 1, 2: 2, 3: 3})) == [0, 3, 2]
    assert numbers(with_ranks_kept(SLOTS, {})) == [0, 1, 2, 3]
