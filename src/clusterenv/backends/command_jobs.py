"""Run node agents as jobs of any scheduler, through the commands of a `Command`.

The ids of all jobs are appended to a file in the run's folder, where `clusterenv gc` (`cancel_noted`) and a later head
of the same run find them.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from clusterenv.backends.command import Command, job_script, log_file, script_file, submit_command, values_of_run
from clusterenv.backends.contract import Hopeless, Plan
from clusterenv.backends.launch.logs import read_tail
from clusterenv.backends.launch.placeholders import fill_words, has_placeholder
from clusterenv.backends.launch.programs import NoAnswer, ask
from clusterenv.errors import StartError

_COMMAND_S = 30.0
_LAST_COMMAND_S = 3.0  # how long a pending command may take once the run is being closed

_LISTED_S = 15.0  # how soon after its submission a job is listed, at the latest: one that is not has ended

_DROP_S = 5.0
_RETRY_S = 0.5
_REASON_S = 30.0  # how long a reason for waiting is shown before it is asked for again

_REASON_SIZE = 300


@dataclass(frozen=True)
class Queue:
    """The commands that list and cancel the jobs of one run. Plain data, for the run's note."""

    values: Mapping[str, str]
    status: Sequence[str]
    cancel: Sequence[str]
    status_line: str
    is_over: str | None

    def ask(self, jobs: Sequence[str], timeout_s: float, closing: threading.Event | None = None) -> dict[str, str]:
        """Return the state of each of these jobs that is listed. Raises StartError if the scheduler does not answer."""
        command = fill_words(self.status, self.values, {"jobs": jobs})
        return parse_states(ask(command, timeout_s=timeout_s, closing=closing), self.status_line, jobs)

    def has_ended(self, state: str) -> bool:
        return self.is_over is not None and re.search(self.is_over, state) is not None

    def end(self, jobs: Sequence[str], deadline: float, unlisted: Collection[str] = ()) -> None:
        """Cancel those of these jobs that have not ended. Raises StartError if some may be left.

        `unlisted`: jobs to cancel even if they are not listed yet.
        A scheduler refuses to cancel a job that has just ended, so a refusal counts only if the job is still listed.
        """
        maybe = set(unlisted)
        while jobs:
            left = list(jobs)
            with contextlib.suppress(StartError):  # the jobs can be cancelled without knowing their states
                states = self.ask(jobs, max(0.1, (deadline - time.monotonic()) / 3))
                left = [job for job in jobs if job in maybe or (job in states and not self.has_ended(states[job]))]
            if not left:
                return
            try:
                self._cancel(left, deadline)
                return
            except NoAnswer:
                raise
            except StartError:
                if time.monotonic() > deadline - 2 * _RETRY_S:
                    raise
            maybe.clear()
            time.sleep(_RETRY_S)

    def _cancel(self, jobs: Sequence[str], deadline: float) -> None:
        is_each = has_placeholder(self.cancel, "job")
        refusal: StartError | None = None
        for group in [[job] for job in jobs] if is_each else [jobs]:
            command = fill_words(self.cancel, {**self.values, "job": group[0]}, {"jobs": group})
            try:
                ask(command, timeout_s=max(0.1, deadline - time.monotonic()))
            except NoAnswer:
                raise
            except StartError as error:  # the others must be cancelled all the same
                refusal = error
        if refusal is not None:
            raise refusal


class CommandJobs:
    """Implement `Jobs` with a scheduler's commands."""

    def __init__(self, command: Command, plan: Plan) -> None:
        self._command, self._plan = command, plan
        values = values_of_run(plan)
        self._queue = Queue(values, command.status, command.cancel, command.status_line, command.is_over)
        self._ledger = ledger_file(plan)
        self._submitted: dict[str, float] = {}  # job → when; all jobs of the run
        self._job = [""] * len(plan.files)  # the last job of each node
        for node, job in read_ledger(self._ledger):  # of an earlier head
            self._submitted[job] = 0.0
            self._job[node] = job
        self._is_complete = True  # whether every job is known; False after a `submit` was killed
        self._states: dict[str, str] = {}
        self._reasons: dict[str, tuple[float, str]] = {}  # job → when it was asked for, the reason
        self._seen: set[str] = set()
        self._asked_at = self._ask_at = 0.0
        self._failure: StartError | None = None  # of the last query
        log_file(plan, 0).parent.mkdir(parents=True, exist_ok=True)

    def note(self) -> dict[str, Any]:
        return {"jobs": str(self._ledger), "queue": asdict(self._queue)}

    def look(self) -> dict[int, str]:
        if time.monotonic() >= self._ask_at and self._submitted:
            self._failure = None
            try:
                self._ask()
            except StartError as error:
                self._failure = error
            self._ask_at = time.monotonic() + self._command.poll_s
        if self._failure is not None:  # raised until the next query: older states are no longer valid
            raise self._failure
        found = {node: self._end_of(job) for node, job in enumerate(self._job) if job}
        return {node: why for node, why in found.items() if why is not None}

    def _ask(self) -> None:
        asked_at = time.monotonic()
        jobs = [job for job in self._job if job]
        self._states = self._queue.ask(jobs, _COMMAND_S, self._plan.closing)
        self._asked_at = asked_at
        self._seen |= self._states.keys()
        waiting = [job for job, state in self._states.items() if self._is_waiting(state)]
        job = next_to_explain(waiting, self._reasons, asked_at)
        if job is not None and self._command.reason:
            text = ""
            with contextlib.suppress(StartError):  # the state is known without it
                command = fill_words(self._command.reason, {**self._queue.values, "job": job}, {})
                text = ask(command, timeout_s=_COMMAND_S, closing=self._plan.closing)
            self._reasons[job] = (asked_at, shorten(text))

    def _is_waiting(self, state: str) -> bool:
        return self._is_stuck(state) or re.search(self._command.is_pending, state) is not None

    def _is_stuck(self, state: str) -> bool:
        return self._command.is_stuck is not None and re.search(self._command.is_stuck, state) is not None

    def _end_of(self, job: str) -> str | None:
        """Return why this job has ended or will never run; None: it waits or runs."""
        state = self._states.get(job)
        if state is None:
            is_known = job in self._seen or self._asked_at > self._submitted[job] + _LISTED_S
            return f"ended: {self._command.status[0]} does not list job {job} any more" if is_known else None
        if self._queue.has_ended(state):
            return f"ended: job {job} is {self._described(job)}"
        if self._is_stuck(state):
            return Hopeless(f"will never run: job {job} is {self._described(job)}")
        return None

    def start(self, node: int) -> None:
        if self._job[node]:
            self.drop(node)  # the last job may wait forever
        script = job_script(self._command, self._plan, node, Path.cwd())
        path = script_file(self._plan, node)
        path.write_text(script)
        path.chmod(0o700)
        command = submit_command(self._command, self._plan, node)
        given = "" if has_placeholder(self._command.submit, "script") else script
        try:
            text = ask(command, given, timeout_s=_COMMAND_S, closing=self._plan.closing, patience_s=_LAST_COMMAND_S)
        except NoAnswer:
            self._is_complete = False
            raise
        job = find_job_id(text, self._command.job_id)
        if job is None:
            self._is_complete = False
            raise StartError(
                f"{command[0]} answered {shorten(text)!r}, in which job_id={self._command.job_id!r} finds no job id"
            )
        self._submitted[job] = time.monotonic()
        self._job[node] = job
        with self._ledger.open("a") as file:
            file.write(f"{node} {job}\n")

    def drop(self, node: int) -> None:
        if job := self._job[node]:
            self._queue.end([job], time.monotonic() + _DROP_S, self._not_listed_yet())
        self._job[node] = ""

    def _not_listed_yet(self) -> list[str]:
        now = time.monotonic()
        return [job for job, at in self._submitted.items() if job not in self._seen and now < at + _LISTED_S]

    def state(self, node: int) -> str:
        return self._described(self._job[node])

    def _described(self, job: str) -> str:
        state, reason = self._states.get(job, ""), self._reasons.get(job, (0.0, ""))[1]
        return f"{state} ({reason})" if reason and self._is_waiting(state) else state

    def log_tail(self, node: int) -> str:
        state, path = self.state(node), log_file(self._plan, node)
        others = [
            f"\n{other}:\n{read_tail(other)}"
            for other in sorted(path.parent.glob(f"{path.name}.*"))
            if _has_text(other)
        ]
        return f"job {self._job[node]}{': ' * bool(state)}{state}\n{path}:\n{read_tail(path)}{''.join(others)}"

    def describe(self) -> str:
        jobs = list(self._submitted)
        listed = ", ".join(jobs[:20]) + (", ..." if len(jobs) > 20 else "")
        logs = log_file(self._plan, 0).parent
        return f"{len(jobs)} jobs submitted by {self._command.submit[0]} ({listed}); logs in {logs}"

    def stop(self, deadline: float) -> None:
        self._queue.end(list(self._submitted), deadline, self._not_listed_yet())
        if not self._is_complete:
            raise StartError(
                f"the answer of a {self._command.submit[0]} is not known: its job may still be submitted. It ends by "
                "itself when it starts, because its key is removed"
            )


# -- what the commands say, and the file of ids -------------------------------------------------------------------


def find_job_id(text: str, pattern: str) -> str | None:
    """Return the id in what `submit` prints: a word, as the file of ids needs it; None if there is none."""
    match = re.search(pattern, text)
    job = "" if match is None else (match[1] if match.re.groups else match[0]) or ""
    return job if re.fullmatch(r"\S+", job) else None


def parse_states(text: str, status_line: str, jobs: Collection[str]) -> dict[str, str]:
    """Return the states of these jobs, from the text that `status` prints."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = re.match(status_line, line)
        if match is not None and match["job"] in jobs:
            found[match["job"]] = (match.groupdict().get("state") or "").strip()
    return found


def next_to_explain(waiting: Sequence[str], reasons: Mapping[str, tuple[float, str]], now: float) -> str | None:
    """Return the waiting job whose reason was never asked for, or longest ago; None: all were asked for recently.

    One job per query: with many nodes, the scheduler would otherwise be asked as many times.
    """
    oldest = min(waiting, key=lambda job: reasons.get(job, (-1.0, ""))[0], default=None)
    if oldest is None or (oldest in reasons and now < reasons[oldest][0] + _REASON_S):
        return None
    return oldest


def shorten(text: str) -> str:
    """Return a command's output as one line that fits into a message."""
    line = "; ".join(part.strip() for part in text.splitlines() if part.strip())
    return line if len(line) <= _REASON_SIZE else line[: _REASON_SIZE - 3] + "..."


def _has_text(path: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.stat().st_size > 0
    return False


def ledger_file(plan: Plan) -> Path:
    return plan.folder / "jobs.txt"


def read_ledger(path: Path) -> list[tuple[int, str]]:
    """Return node and id of every job that was submitted, in order; lines that a full disk has cut are skipped."""
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    # Without its end, "1 34" may be the job of somebody else, "1 3".
    return [(int(node), job) for node, job in re.findall(r"^(\d+) (\S+)\n", text, re.MULTILINE)]


def cancel_noted(note: Mapping[str, Any], deadline: float) -> str:
    """Cancel the jobs of a run whose head is gone; `note`: from `CommandJobs.note`."""
    path, queue = Path(note["jobs"]), Queue(**note["queue"])
    jobs = [job for _, job in read_ledger(path)]
    is_new = bool(jobs) and time.time() < path.stat().st_mtime + _LISTED_S
    queue.end(jobs, deadline, jobs[-1:] if is_new else ())
    return f"{len(jobs)} jobs are cancelled or have ended: {', '.join(jobs)}"
