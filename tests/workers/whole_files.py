"""Files of tests for xdist's workers, whole, in which one that crashes stops no others.

Under `--dist loadfile` of pytest-xdist 3.8 a crash may hold up the whole run for ever: the files that the lost worker
had finished are given out again, as work without a test, and a new worker waits for a second test before it runs one
(pytest-dev/pytest-xdist#1323 and #1327, mended after 3.8). The test that crashed is run again, too (#1371).
"""

import contextlib
import itertools

from xdist.scheduler.loadfile import LoadFileScheduling
from xdist.workermanage import WorkerController


class WholeFiles(LoadFileScheduling):
    """As `loadfile`, but after a crash the rest of the file goes on elsewhere, and only that."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Returns the test at which a worker was lost; None if it had nothing left to do."""
        files = self.assigned_work[node].values()
        pending = [nodeid for tests in files for nodeid, is_done in tests.items() if not is_done]
        if not pending:
            return super().remove_node(node)
        self.registered_collections.pop(node, None)
        del self.assigned_work[node]
        for path, rest in itertools.groupby(pending[1:], self._split_scope):
            self.workqueue[path] = {nodeid: False for nodeid in rest}
            self.workqueue.move_to_end(path, last=False)
        for other in self.nodes:
            self._reschedule(other)
        return pending[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Gives a worker a file. One that is lost, though this is not known yet, keeps it until it is removed, when the
        file goes on elsewhere; xdist 3.8 would end the run.
        """
        with contextlib.suppress(OSError):
            super()._assign_work_unit(node)

    def schedule(self) -> None:
        """Gives out work, to each worker until it has two tests, without which it runs none."""
        super().schedule()
        for node in self.nodes:
            while self.workqueue and not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                self._assign_work_unit(node)
            if not self.workqueue and not node.shutting_down:
                node.shutdown()
