"""A candidate of the search: how many replicas, stages, micro-batches, on which meshes; not which layers go where."""

import dataclasses
from collections.abc import Sequence

from autoshard.pipelines.schedule.tasks import ScheduleKind
from autoshard.pipelines.search.replica_group import ReplicaGroup, SearchContext


@dataclasses.dataclass(frozen=True, slots=True)
class Candidate:
    """What a group looks like, without its cut.

    Attributes:
      options: The mesh option of each part of a pipeline, in the order of the stages. counts: The submeshes of each
        part.
      micro_batch_size: Of all replicas. num_micro_batches: Of the replica that has most. num_pipelines: Replicas.
      schedule: Of all of them. chunks: Stages on each submesh.
      bound_s: No cut is faster. guess_s: What is to be expected.
      each_s: The slowest submesh takes no less for one micro-batch.
    """

    options: tuple[int, ...]
    counts: tuple[int, ...]
    micro_batch_size: int
    num_micro_batches: int
    num_pipelines: int
    schedule: ScheduleKind
    chunks: int
    bound_s: float
    guess_s: float
    each_s: float

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline."""
        return sum(self.counts) * self.chunks

    def group(self, context: SearchContext, num_micro_batches: Sequence[int]) -> ReplicaGroup:
        """Lays the replicas out, neighbours in a pipeline being neighbours in the cluster.

        Args:
          context: Costs and cluster.
          num_micro_batches: Of each replica, the greatest first.
        """
        submeshes = tuple(
            tuple(
                context.topology.submesh(option, replica * count + index)
                for option, count in zip(self.options, self.counts, strict=True)
                for index in range(count)
            )
            for replica in range(len(num_micro_batches))
        )
        return ReplicaGroup(submeshes, self.micro_batch_size, tuple(num_micro_batches), self.schedule, self.num_stages)
