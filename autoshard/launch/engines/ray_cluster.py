"""Workers on the nodes of a Ray cluster: Ray places them, starts them there, and notices when a node is gone.

Every worker has a place: one bundle of a placement group, and in it an actor that owns the worker's processes
(`ray_actor.py`). Ray places the bundles that a lost node had on another node as soon as one has room, which brings
the worker's place back.
"""

import contextlib
import os
import pathlib
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autoshard.errors import ClusterError, MissingExtraError
from autoshard.launch.engines.local import LOOPBACK
from autoshard.launch.engines.protocol import Command, Exit, Line, Process, Slot
from autoshard.launch.engines.ray_actor import Place, WorkerActor

ACCELERATORS = ("TPU", "GPU")
"""Ray's names of the resources that a worker without CPU devices takes."""

FORWARDED = ("AUTOSHARD_", "JAX_", "LIBTPU_", "NCCL_", "XLA_")
"""Beginnings of the driver's environment variables that workers on other nodes get as well."""

_ONE_MACHINE_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray reads it when imported. Where it is 0, and by default elsewhere than on Linux, its servers listen on the loopback
address alone; otherwise they listen on all of a machine's addresses."""

_NOBODY = f"{LOOPBACK}:9"
"""The port of the discard protocol, at which nothing listens today."""

_LONG_POLL_S = 10.0
"""An actor answers at once when there is news; otherwise after this time, so that no call stays open for ever."""

_CALL_LIMIT_S = 15.0
"""Longest time for an actor to start or stop a process; one that takes longer counts as lost, with its node."""

_START_LIMIT_S = 60.0
_LATER_S = 5.0
"""A new engine waits so long for all places, and so long for further ones than the least that no node has room for."""

_TRIES = 3
"""Ray loses actors while it creates them when their node dies; if it does so repeatedly, something else is wrong."""


class _Worker:
    """A worker's place in the cluster, which may be on other nodes in turn; without a slot it is not there now."""

    def __init__(self, group: Any, bundle: int):
        self.group, self.bundle = group, bundle
        self.actor: Any = None
        self.node_id = ""
        self.slot: Slot | None = None
        self.failures = 0
        self.processes: dict[int, int] = {}  # the actor's number of a process -> the engine's


class RayEngine:
    """Processes on the nodes of a Ray cluster, to which the driver of a run connects."""

    name = "ray"

    def __init__(
        self,
        run_dir: pathlib.Path,
        least_workers: int,
        most_workers: int,
        devices_per_worker: int | None = None,
        address: str | None = None,
    ):
        """Connects to the cluster, and waits until as many workers as it has room for have their places.

        Fewer than `least_workers` may have one by then; `capacity` tells.

        Args:
            run_dir: the run's output folder, on a file system that all nodes share.
            least_workers: places that Ray reserves at once or not at all.
            most_workers: all places; those beyond the least are reserved one by one.
            devices_per_worker: CPU devices of each worker, for each of which a CPU is reserved; None for the
                accelerators (GPUs or TPUs) of a node.
            address: `host:port` of the cluster, or `auto` for the one that runs on this machine; None for the one that
                RAY_ADDRESS names, or else a new one of this machine alone, which nobody reaches from outside.

        Raises:
            MissingExtraError: Ray is not installed.
            ClusterError: the cluster cannot be reached, or has no accelerators.
        """
        address = address or os.environ.get("RAY_ADDRESS") or None
        self._ray = _import_ray(is_local=address is None or address.startswith(LOOPBACK))
        self._run_dir = run_dir
        self._owns_connection = not self._ray.is_initialized()
        if self._owns_connection:
            self._connect(address)
        self._takes = bundle = self._bundle(devices_per_worker)
        others = {name: count for name, count in bundle.items() if name not in ("CPU", "GPU")}
        self._options = {"num_cpus": bundle["CPU"], "num_gpus": bundle.get("GPU", 0), "resources": others}
        together = self._ray.util.placement_group([bundle] * least_workers, strategy="PACK")
        alone = [self._ray.util.placement_group([bundle]) for _ in range(most_workers - least_workers)]
        self._groups = [together, *alone]
        self._workers = [_Worker(together, number) for number in range(least_workers)]
        self._workers += [_Worker(group, 0) for group in alone]
        self._numbers: dict[tuple[str, int], int] = {}  # slots, by node and the worker's place in `_workers`
        self._processes: dict[int, _Worker] = {}
        self._started = 0
        self._news: list[Line | Exit] = []
        self._calls: dict[Any, _Worker] = {}
        for worker in self._workers:
            self._create_actor(worker)
        self._await_places(least_workers)

    def capacity(self) -> Sequence[Slot]:
        self._look(0)
        return sorted((w.slot for w in self._workers if w.slot is not None), key=lambda slot: slot.number)

    def why_few(self) -> str:
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        largest = {name: max((node.get(name, 0) for node in alive), default=0) for name in self._takes}
        takes, has = (" and ".join(f"{n:g} {name}" for name, n in each.items()) for each in (self._takes, largest))
        nodes = f"{len(alive)} node{'s' if len(alive) != 1 else ''}"
        return f"Each takes {takes} of one node; the Ray cluster has {nodes}, of at most {has}."

    def free_address(self, slot: Slot) -> str:
        """As of `Engine`; of a node that is gone, an address at which nobody answers."""
        worker = self._worker_at(slot)
        return (worker and self._ask(worker, worker.actor.free_address.remote(slot))) or _NOBODY

    def start(self, slot: Slot, command: Command) -> Process:
        """As of `Engine`; on a node that is gone the process has the number 0 there, and its end is told by `poll`."""
        self._started += 1
        forwarded = {key: value for key, value in os.environ.items() if key.startswith(FORWARDED)}
        command = Command(command.arguments, {**forwarded, **command.environment}, command.log_dir, command.niceness)
        worker = self._worker_at(slot)
        process = worker and self._ask(worker, worker.actor.start.remote(slot, command))
        if worker is None or process is None:
            self._news.append(Exit(self._started, None))
            return Process(self._started, 0, slot)
        worker.processes[process.number] = self._started
        self._processes[self._started] = worker
        return Process(self._started, process.pid, slot)

    def send(self, process: int, text: str) -> None:
        if worker := self._processes.get(process):
            worker.actor.send.remote(_local_number(worker, process), text)

    def terminate(self, process: int) -> None:
        if worker := self._processes.get(process):
            worker.actor.terminate.remote(_local_number(worker, process))

    def poll(self, timeout_s: float) -> Sequence[Line | Exit]:
        until = time.monotonic() + timeout_s
        self._look(0 if self._news else timeout_s)
        while not self._news and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)
        news, self._news = self._news, []
        return news

    def stop(self, processes: Sequence[int]) -> None:
        there = [(number, self._processes.pop(number)) for number in processes if number in self._processes]
        calls = {}
        for worker in dict.fromkeys(worker for _, worker in there):
            local = [_local_number(worker, number) for number, its in there if its is worker]
            calls[worker.actor.stop.remote(local)] = worker
            for number in local:
                del worker.processes[number]
        self._await(list(calls))
        for call, worker in calls.items():
            self._ask(worker, call, limit_s=0.1)
        self._news = [item for item in self._news if item.process not in processes]

    def close(self) -> None:
        self.stop(tuple(self._processes))
        self._await([worker.actor.close.remote() for worker in self._workers if worker.slot is not None])
        for worker in self._workers:
            self._ray.kill(worker.actor, no_restart=True)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._workers, self._groups, self._calls, self._news = [], [], {}, []
        if self._owns_connection:
            self._ray.shutdown()

    def forget_memory(self) -> None:
        self._await([worker.actor.forget_memory.remote() for worker in self._workers if worker.slot is not None])

    def _connect(self, address: str | None) -> None:
        """Joins a cluster that runs, or starts one of this machine, without a dashboard."""
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "autoshard"}
        with _signal_handlers_kept():
            if address is None:
                self._ray.init(address="local", include_dashboard=False, _node_ip_address=LOOPBACK, **quiet)
                return
            try:
                _try_port(address)
                self._ray.init(address=address, **quiet)
            except (OSError, ValueError) as error:
                raise ClusterError(
                    f"The Ray cluster at {address} cannot be reached: {str(error).rstrip('.')}. Start it with `ray "
                    "start`, or correct the address (RAY_ADDRESS), which is `auto` or host:port."
                ) from error

    def _bundle(self, devices_per_worker: int | None) -> dict[str, float]:
        """What Ray reserves for a worker: CPUs for its devices, or the accelerators of a node."""
        if devices_per_worker is not None:
            return {"CPU": devices_per_worker}
        alive = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        for name in ACCELERATORS:
            if counts := [resources[name] for resources in alive if resources.get(name)]:
                return {"CPU": 1, name: min(counts)}
        raise ClusterError(
            f"A worker takes the {' or '.join(ACCELERATORS)}s of a node; none of the {len(alive)} nodes of the Ray "
            "cluster has any. Use other nodes, or give --devices-per-worker to train on CPU devices."
        )

    def _create_actor(self, worker: _Worker) -> None:
        """Asks Ray for an actor in the worker's bundle, which it creates once a node has room."""
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placement_group=worker.group, placement_group_bundle_index=worker.bundle
        )
        actor_class = self._ray.remote(WorkerActor)
        options = actor_class.options(**self._options, scheduling_strategy=strategy, max_restarts=0)
        worker.actor = options.remote()
        self._calls[worker.actor.open.remote(str(self._run_dir.resolve()), os.getcwd())] = worker

    def _await_places(self, least_workers: int) -> None:
        """Waits until all workers have a place; not long for those beyond the least for which no node has room."""
        began_s = time.monotonic()
        while absent := [worker for worker in self._workers if worker.slot is None]:
            waited_s = time.monotonic() - began_s
            is_enough = len(self._workers) - len(absent) >= least_workers
            is_coming = any(self._has_room(worker) for worker in absent)
            if waited_s > _START_LIMIT_S or (is_enough and not is_coming and waited_s > _LATER_S):
                return
            self._look(0.1)

    def _has_room(self, worker: _Worker) -> bool:
        return self._ray.util.placement_group_table(worker.group)["state"] == "CREATED"

    def _look(self, timeout_s: float) -> None:
        """Takes the answers of actors that are there; waits at most `timeout_s` for the first."""
        answered, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout_s)
        if answered:
            answered, _ = self._ray.wait(list(self._calls), num_returns=len(self._calls), timeout=0)
        for call in answered:
            worker = self._calls.pop(call, None)
            answer = worker and self._ask(worker, call)
            if worker is None or answer is None:  # its actor was lost by an earlier answer, or is by this one
                continue
            if isinstance(answer, Place):
                self._settle(worker, answer)
            else:
                self._news += self._of_this_engine(worker, answer)
            self._calls[worker.actor.poll.remote(_LONG_POLL_S)] = worker

    def _settle(self, worker: _Worker, place: Place) -> None:
        """Gives the worker its slot; on a node where it was before, the same number."""
        key = (place.node_id, self._workers.index(worker))
        number = self._numbers.setdefault(key, len(self._numbers))
        worker.node_id, worker.failures = place.node_id, 0
        worker.slot = Slot(number, place.host, place.memory_dir)

    def _of_this_engine(self, worker: _Worker, news: Sequence[Line | Exit]) -> Iterator[Line | Exit]:
        """The news with the engine's numbers of processes; nothing of those that were stopped."""
        for item in news:
            number = worker.processes.get(item.process)
            if number is None:
                continue
            if isinstance(item, Exit):
                del worker.processes[item.process], self._processes[number]
                yield Exit(number, item.status)
            else:
                yield Line(number, item.text)

    def _ask(self, worker: _Worker, call: Any, limit_s: float = _CALL_LIMIT_S) -> Any | None:
        """The answer of a worker's actor; None if the actor is gone or does not answer, which counts as lost."""
        try:
            return self._ray.get(call, timeout=limit_s)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
            self._lose(worker, error)
            return None
        except self._ray.exceptions.RayTaskError as error:
            raise ClusterError(
                f"A node of the Ray cluster cannot run a worker: {error.cause}. All nodes need this Python, the "
                "working directory and the output folder in the same places."
            ) from error

    def _lose(self, worker: _Worker, error: Exception) -> None:
        """Takes the worker's actor as gone, tells the end of its processes, and asks for another one."""
        worker.failures += worker.slot is None
        if worker.failures >= _TRIES:
            raise ClusterError(f"Ray cannot start a worker; it said, {_TRIES} times: {error}") from error
        self._news += [Exit(number, None) for number in worker.processes.values()]
        for number in worker.processes.values():
            del self._processes[number]
        self._calls = {call: its for call, its in self._calls.items() if its is not worker}
        worker.processes, worker.slot = {}, None
        self._ray.kill(worker.actor, no_restart=True)
        self._create_actor(worker)

    def _await(self, calls: Sequence[Any]) -> None:
        """Waits until all calls are answered or failed, within the limit."""
        if calls:
            self._ray.wait(list(calls), num_returns=len(calls), timeout=_CALL_LIMIT_S)

    def _worker_at(self, slot: Slot) -> _Worker | None:
        return next((worker for worker in self._workers if worker.slot == slot), None)


def _local_number(worker: _Worker, process: int) -> int:
    return next(local for local, number in worker.processes.items() if number == process)


def _import_ray(is_local: bool) -> Any:
    """Ray; one that binds to the loopback address if `is_local`, and it was not imported before."""
    if is_local:
        os.environ.setdefault(_ONE_MACHINE_ONLY, "0")
    with _signal_handlers_kept():
        try:
            import ray  # pyright: ignore[reportMissingImports]
            import ray.util.scheduling_strategies  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise MissingExtraError(
                "--engine ray needs Ray, which is not installed. Run: pip install 'autoshard[ray]'"
            ) from error
    return ray


def _try_port(address: str) -> None:
    """Raises OSError where nobody answers at `host:port`; Ray itself tries for minutes, and then ends the process."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CALL_LIMIT_S).close()


@contextlib.contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Ray handles SIGTERM by ending the process; the supervisor drains its workers first."""
    handlers: Mapping[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            with contextlib.suppress(ValueError, TypeError):  # not in the main thread, or not set from Python
                signal.signal(number, handler)
