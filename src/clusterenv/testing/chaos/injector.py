"""`Injector`: applies faults to the processes, links and machines of a run, in a separate thread.

It finds processes through the records of `Numbered` environments, not by asking the system under test.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from clusterenv.testing.chaos.faults import ENVIRONMENT, Fault, Kind
from clusterenv.testing.chaos.numbered import Record, Trouble, ask, lives, read_record

__all__ = ["Act", "Injector", "Later"]

Later = tuple[float, Callable[[], None]]
"""Seconds until a fault is undone, and the function that undoes it."""
Act = Callable[[Fault], Later | None]
"""Applies a fault; returns how to undo it, or None."""


class Injector:
    """Applies the faults of a plan, each at its time, and undoes those that end.

    Args:
        folder: the folder of the `Numbered` environments.
        plan: from `plan_faults`, or made by hand.
        acts: functions for kinds that need more than the processes of the run, e.g. from `link_acts`, `stranger_acts`.

    Attributes:
        done: the faults that happened.
        missed: the faults whose process was gone at their time.

    Example:
        >>> import tempfile, clusterenv as ce
        >>> from clusterenv.testing import chaos
        >>> folder = tempfile.TemporaryDirectory()
        >>> plan = [chaos.Fault(0.1, chaos.Kind.KILL, slot=1, amount=0, random=0)]
        >>> ledger = chaos.Ledger(folder.name, num_envs=2)
        >>> with ce.ClusterEnv(chaos.numbered(folder.name, 2), backend=ce.Local(workers=2)) as envs:
        ...     ledger.reset(envs.reset(seed=1)[0])
        ...     with chaos.Injector(folder.name, plan) as injector:
        ...         while not envs.events() or not injector.done:
        ...             actions = envs.action_space.sample()
        ...             ledger.step(actions, envs.step(actions), envs.events())
        >>> ledger.check().lost <= 1
        True
        >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        plan: Sequence[Fault],
        acts: Mapping[Kind, Act] | None = None,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._folder = Path(folder)
        self._plan = list(plan)
        self._acts: dict[Kind, Act] = {**self._own(), **(acts or {})}
        unknown = {fault.kind for fault in plan} - set(self._acts)
        if unknown:
            raise ValueError(f"no act for {', '.join(sorted(kind.name for kind in unknown))}")
        self._log = log
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)
        self.done: list[Fault] = []
        self.missed: list[Fault] = []
        self.errors: list[BaseException] = []

    def __enter__(self) -> Injector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if self.errors and error is None:
            raise self.errors[0]

    @property
    def pending(self) -> int:
        """Return the number of faults that are still to be undone."""
        return len(self._undo)

    # -- the thread -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        begin = time.monotonic()
        try:
            for fault in self._plan:
                if not self._wait_until(begin + fault.at_s):
                    break
                self.make(fault)
            while self._undo and self._wait_until(min(due for due, _ in self._undo)):
                pass
        except BaseException as error:
            self.errors.append(error)
        finally:
            self._undo_due(float("inf"))

    def _wait_until(self, when: float) -> bool:
        """Wait, and undo faults that become due; return False if the injector was stopped."""
        while True:
            due = min((due for due, _ in self._undo), default=when)
            if self._over.wait(max(0.0, min(when, due) - time.monotonic())):
                return False
            self._undo_due(time.monotonic())
            if time.monotonic() >= when:
                return True

    def _undo_due(self, now: float) -> None:
        for entry in sorted((entry for entry in self._undo if entry[0] <= now), key=lambda entry: entry[0]):
            with contextlib.suppress(ProcessLookupError):
                entry[1]()
            self._undo.remove(entry)

    def make(self, fault: Fault) -> None:
        """Apply this fault now."""
        try:
            undo = self._acts[fault.kind](fault)
        except ProcessLookupError:
            self.missed.append(fault)
            self._log(f"missed {fault}")
            return
        if undo is not None:
            self._undo.append((time.monotonic() + undo[0], undo[1]))
        self.done.append(fault)
        self._log(str(fault))

    # -- faults that need only processes ------------------------------------------------------------------------

    def _own(self) -> dict[Kind, Act]:
        acts: dict[Kind, Act] = dict.fromkeys(ENVIRONMENT, self._trouble)
        acts[Kind.KILL] = lambda fault: self._signal(fault, signal.SIGKILL, is_agent=False)
        acts[Kind.STOP] = lambda fault: self._stop(fault, is_agent=False)
        acts[Kind.KILL_NODE] = lambda fault: self._signal(fault, signal.SIGKILL, is_agent=True)
        acts[Kind.STOP_NODE] = lambda fault: self._stop(fault, is_agent=True)
        acts[Kind.TERMINATE_NODE] = lambda fault: self._signal(fault, signal.SIGTERM, is_agent=True)
        return acts

    def _trouble(self, fault: Fault) -> None:
        ask(self._folder, fault.slot, Trouble[fault.kind.name], fault.amount)

    def _signal(self, fault: Fault, number: int, is_agent: bool) -> None:
        with self._process(fault.slot, is_agent) as process:
            signal.pidfd_send_signal(process, number)

    def _stop(self, fault: Fault, is_agent: bool) -> Later:
        with self._process(fault.slot, is_agent) as process:
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            held = os.dup(process)

        def go_on() -> None:
            try:
                signal.pidfd_send_signal(held, signal.SIGCONT)
            finally:
                os.close(held)

        return fault.amount, go_on

    @contextlib.contextmanager
    def _process(self, slot: int, is_agent: bool) -> Iterator[int]:
        """Open a pidfd of a slot's worker or of its node agent; raise ProcessLookupError if it is gone."""
        record = self._record(slot)
        descriptor = os.pidfd_open(record.agent if is_agent else record.pid)
        try:
            _check_alive(record)  # after the open: from then on the pidfd cannot refer to another process
            yield descriptor
        finally:
            os.close(descriptor)

    def _record(self, slot: int) -> Record:
        """Return the record of the newest life of a slot."""
        known = lives(self._folder, slot)
        if not known:
            raise ProcessLookupError(f"slot {slot} has never been made")
        record = read_record(self._folder, slot, known[-1])
        if not record.pid:
            raise ProcessLookupError(f"slot {slot} is being made")
        return record


def _check_alive(record: Record) -> None:
    """Raise ProcessLookupError if the worker is gone: its process number, and its agent's, may have been reused.

    While a worker runs, so does its agent: it is the worker's grandparent, and the worker would have died with it.
    """
    try:
        fields = Path(f"/proc/{record.pid}/stat").read_text().rsplit(")", 1)[1].split()
    except FileNotFoundError:
        raise ProcessLookupError(f"process {record.pid} is gone") from None
    if int(fields[19]) != record.began or fields[0] == "Z":
        raise ProcessLookupError(f"process {record.pid} is gone or was replaced by another")
