"""Who was the first to fail, and when a run may not go on."""

from autoshard.launch.failures import HOST_LOST, FailureCount, Loss, cause_of, origin
from autoshard.launch.messages import Failed, Phase
from autoshard.launch.settings import Budgets


def report(step, error="ValueError", message="bad", **kind):
    return Failed(step=step, error=error, message=message, traceback="", **kind)


def loss(rank, cause, told=None):
    step = 5 if told is None else told.step
    return Loss(rank, 100 + rank, rank, "here", cause, Phase.TRAINING, step, 0.1, told)


def test_causes_in_words():
    assert [cause_of(status) for status in (-9, 1, None)] == ["signal 9", "exit status 1", HOST_LOST]


def test_those_that_only_followed_are_not_named():
    killed, aborted = loss(2, "signal 9"), loss(0, "signal 6")
    follower = loss(1, "exit status 1", report(5, "JaxRuntimeError", "Gloo all-reduce failed", is_peer_loss=True))
    assert origin([follower, aborted, killed]) == (killed,)
    assert origin([follower, aborted]) == (follower,)


def test_two_that_were_killed_are_both_named():
    assert origin([loss(1, "signal 9"), loss(0, "signal 9")]) == (loss(1, "signal 9"), loss(0, "signal 9"))


def test_the_same_error_at_the_same_step_ends_the_run_with_that_error():
    count = FailureCount(Budgets(at_one_step=3))
    for _ in range(2):
        assert count.add([loss(1, "exit status 1", report(7))]) is None
        count.made_progress()
    assert count.add([loss(0, "exit status 1", report(8))]) is None  # another step
    error = count.add([loss(2, "exit status 1", report(7))])
    assert error is not None and "Step 8 failed 3 times" in error and "ValueError: bad" in error


def test_workers_that_end_by_themselves_without_a_word_end_the_run_as_well():
    """As where something cannot be imported: nobody could tell, and starting them again helps nothing."""
    count = FailureCount(Budgets(at_one_step=3))
    assert [count.add([loss(slot, "exit status 2"), loss(3, "exit status 2")]) for slot in (1, 2)] == [None, None]
    error = count.add([loss(0, "exit status 2")])
    assert error is not None and "exit status 2" in error and "logs" in error


def test_losing_the_same_step_to_others_again_and_again_is_no_error_of_the_program():
    count = FailureCount(Budgets(at_one_step=3))
    followed = loss(1, "exit status 1", report(7, "JaxRuntimeError", "Gloo all-reduce failed", is_peer_loss=True))
    assert [count.add([followed]) for _ in range(5)] == [None] * 5
    assert [count.add([loss(1, "signal 9")]) for _ in range(5)] == [None] * 5


def test_an_error_that_would_come_again_ends_the_run_at_once():
    told = report(0, "ConfigError", "optimizer.name: no such", is_final=True)
    assert FailureCount(Budgets()).add([loss(0, "exit status 1", told)]) == "ConfigError: optimizer.name: no such"


def test_preemptions_and_crashes_have_budgets_of_their_own():
    count = FailureCount(Budgets(preemptions=1, crashes=1))
    assert count.add([loss(0, HOST_LOST)]) is None
    assert count.add([loss(1, "signal 9")]) is None
    assert "--max-crashes is 1" in (count.add([loss(2, "signal 9")]) or "")
    assert "--max-preemptions is 1" in (FailureCount(Budgets(preemptions=1)).add([loss(0, HOST_LOST)] * 2) or "")


def test_failures_of_a_slot_count_only_in_a_row():
    count = FailureCount(Budgets())
    count.add([loss(1, "signal 11")])
    count.add([loss(1, "signal 11")])
    assert count.failures_of(1) == 2
    count.made_progress()
    assert count.failures_of(1) == 0
