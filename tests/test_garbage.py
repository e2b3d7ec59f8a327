"""The collector is as it was, whatever happens inside; and what was made inside is old."""

import gc

import pytest

from autoshard.garbage import collection_paused


@pytest.fixture(autouse=True)
def enabled():
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_it_is_paused_inside_and_resumes_after():
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled(), "the inner pause ends, the outer goes on"
    assert gc.isenabled()


def test_it_resumes_after_an_error():
    @collection_paused()
    def fail():
        assert not gc.isenabled()
        raise KeyError("x")

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()


def test_a_caller_without_collector_stays_without():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_what_is_made_inside_is_old():
    with collection_paused():
        made = [[] for _ in range(3)]
    old = {id(o) for o in gc.get_objects(generation=2)}
    assert {id(made), *map(id, made)} <= old
    assert gc.get_freeze_count() == 0


def test_frozen_objects_stay_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collection_paused():
        kept = [[] for _ in range(3)]
    assert gc.get_freeze_count() >= frozen - 100, "but for those that died meanwhile"
    assert kept and gc.isenabled()
