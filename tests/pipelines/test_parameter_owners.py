"""Each parameter lives where it is read, and owners are spread over the replicas."""

import collections
import itertools

from autoshard.pipelines.plan.parameter_owners import StageId, choose_owners


def test_in_a_pipeline_the_first_reader_owns():
    readers = [[StageId(0, 2), StageId(0, 0)], [StageId(0, 1)], []]
    assert choose_owners([1.0, 1.0, 1.0], readers, 1) == (StageId(0, 0), StageId(0, 1), StageId(0, 0))


def test_among_pipelines_the_largest_goes_to_the_one_that_owns_least():
    """Sizes 5, 4, 3, 3 in two replicas: 5 | 4, 5 | 4 + 3, 5 + 3 | 4 + 3."""
    readers = [[StageId(0, k), StageId(1, k)] for k in range(4)]
    owners = choose_owners([3.0, 5.0, 4.0, 3.0], readers, 2)
    assert owners == (StageId(1, 0), StageId(0, 1), StageId(1, 2), StageId(0, 3))


def test_each_stage_is_shared_out():
    """A table of 10 on the first stage, kernels of 4 on both: none of the second makes up for the table."""
    sizes, stages = [10.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 4.0], [0, 1, 1, 1, 1, 0, 0, 0]
    owners = choose_owners(sizes, [[StageId(0, s), StageId(1, s)] for s in stages], 2)
    owned = collections.Counter()
    for size, owner in zip(sizes, owners, strict=True):
        owned[owner] += size
    assert owned == {StageId(0, 0): 10, StageId(1, 0): 12, StageId(0, 1): 8, StageId(1, 1): 8}


def test_shares_are_those_of_stages_of_other_lengths():
    """Two stages on one pipeline, one stage of all layers beside them: each owns half of what it reads."""
    readers = [[StageId(0, 0), StageId(1, 0)]] * 4 + [[StageId(0, 1), StageId(1, 0)]] * 4
    owners = choose_owners([1.0] * 8, readers, 2)
    assert collections.Counter(owners) == {StageId(0, 0): 2, StageId(0, 1): 2, StageId(1, 0): 4}


def test_every_owner_reads_its_parameter_and_shares_are_even_to_the_largest_parameter():
    sizes = [float(1 + n * n % 17) for n in range(40)]
    for num_pipelines in (2, 3, 5):
        readers = [
            [StageId(p, s) for p, s in itertools.product(range(num_pipelines), (n % 4, 3))] for n in range(len(sizes))
        ]
        owners = choose_owners(sizes, readers, num_pipelines)
        assert all(owner in own for owner, own in zip(owners, readers, strict=True))
        owned = collections.Counter()
        for size, owner in zip(sizes, owners, strict=True):
            owned[owner] += size
        for stage in range(4):
            each = [owned[StageId(p, stage)] for p in range(num_pipelines)]
            assert max(each) - min(each) <= max(sizes)


def test_a_parameter_that_one_replica_reads_stays_there():
    assert choose_owners([9.0, 1.0], [[StageId(0, 0)], [StageId(0, 0), StageId(1, 0)]], 2)[1] == StageId(1, 0)
