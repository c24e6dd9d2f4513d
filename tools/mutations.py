"""Plant defects in a copy of the package, one by one, and search for each with simulated runs.

`python -m tools.mutations [--seconds 60] [--only TEXT]` prints for each defect whether it was found, after how many CPU
seconds and schedules, and by which rule.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SIMULATION = ROOT / "tests" / "support" / "simulation"


class Mutation(NamedTuple):
    name: str
    file: str
    old: str
    new: str


MUTATIONS = [
    Mutation(
        "an undelivered ending row is rebuilt over",
        "engine/slots.py",
        "    if row is Row.READY_ENDING:\n        return Env.DOWN, False",
        "    if row is Row.READY_ENDING:\n        return Env.DUE, False",
    ),
    Mutation(
        "SAME_STEP: a loss after an ending row is not reported",
        "engine/slots.py",
        "if row is Row.READY or (row is Row.READY_ENDING and mode is SAME_STEP):",
        "if row is Row.READY:",
    ),
    Mutation(
        "a reset that is lost is not done again",
        "engine/slots.py",
        "    if row is Row.RESETTING or was_held:\n        return Env.DUE, False",
        "    if row is Row.RESETTING or was_held:\n        return Env.DOWN, False",
    ),
    Mutation(
        "an awaited row of a slot that never started is not brought",
        "engine/slots.py",
        "return (Env.DUE if row is Row.AWAITED else Env.DOWN), False",
        "return Env.DOWN, False",
    ),
    Mutation(
        "a loss waits, and no step reports it",
        "engine/slots.py",
        "if record.loss is not None and self.mode is not SAME_STEP:",
        "if False:",
    ),
    Mutation(
        "a reset does not forget a loss",
        "engine/slots.py",
        '        record.loss = None\n        if record.env is Env.HELD:\n            self._live(record, "reset")',
        '        if record.env is Env.HELD:\n            self._live(record, "reset")',
    ),
    Mutation(
        "losses of rows that were given up are forgotten",
        "engine/slots.py",
        "        record.loss = loss\n        if record.env is Env.LIVE:",
        "        if record.env is Env.LIVE:",
    ),
    Mutation(
        "the number of ready rows counts losses twice",
        "engine/rows.py",
        "return int(np.count_nonzero(self.ready))",
        "return int(np.count_nonzero(self.ready)) + len(self._lost_rows)",
    ),
    Mutation(
        "a row that reports a loss turns the side",
        "engine/rows.py",
        "written = slots[~is_loss]",
        "written = slots",
    ),
    Mutation(
        "delivered rows stay ready",
        "engine/rows.py",
        "        self.ready[rows] = False\n        self.is_loss[rows] = False",
        "        self.is_loss[rows] = False",
    ),
    Mutation(
        "a fragment begins from the row before the first one",
        "engine/rows.py",
        "self.buffers.side[slot] ^= 1\n        self._find_side()\n        self._keep_objects([slot])",
        "self._keep_objects([slot])",
    ),
    Mutation(
        "step goes on from the observation before a fragment",
        "engine/rows.py",
        "shared[side[rows], np.arange(rows.start, rows.stop)] = collected[rows]",
        "pass",
    ),
    Mutation(
        "a row of a slot whose loss an exception reports stays ready",
        "engine/rows.py",
        "self.awaited[slot] = self.started[slot] = self.ready[slot] = self.is_loss[slot] = False",
        "self.awaited[slot] = self.started[slot] = False",
    ),
    Mutation(
        "losses of nodes count as crashes",
        "engine/failures.py",
        "if exit.cause is Cause.CRASHED:",
        "if exit.cause is not Cause.MOVED:",
    ),
    Mutation(
        "a rebuilt environment keeps its incarnation",
        "engine/incarnations.py",
        "self.numbers[slot] += 1",
        "self.numbers[slot] += 0",
    ),
    Mutation(
        "a first row that nobody awaits is delivered",
        "engine/failures.py",
        "if state.rows.awaited[slot] and not state.rows.ready[slot]:",
        "if True:",
    ),
    Mutation(
        "requests of a dead worker stay open for its replacement",
        "engine/requests.py",
        "        self._open[worker].clear()\n        self.count -= len(requests)",
        "        pass",
    ),
    Mutation(
        "answered requests are still counted",
        "engine/requests.py",
        "is not None:\n            self.count -= 1",
        "is not None:\n            self.count -= 0",
    ),
    Mutation(
        "a stale row is taken for that of a worker that has not answered",
        "engine/engine.py",
        "if worker.index < done:",
        "if worker.index <= done:",
    ),
    Mutation(
        "the first part of an answer closes its request",
        "engine/engine.py",
        "        if reply.last:\n            state.requests.close(request)",
        "        state.requests.close(request)",
    ),
    Mutation(
        "the row of an environment that failed is delivered",
        "engine/engine.py",
        "[slot for slot in reply.slots if slot not in failed] if failed else reply.slots",
        "reply.slots",
    ),
    Mutation(
        "a known loss is taken for another one",
        "engine/engine.py",
        "if request.kind is Kind.REBUILD or not state.slots.is_gone(fault.slot):",
        "if True:",
    ),
    Mutation(
        "a fragment that was given up is taken for the next one",
        "engine/collecting/fragments.py",
        "            fragment.is_wanted = False\n",
        "",
    ),
    Mutation(
        "the fragment of a lost worker is not asked for again",
        "engine/collecting/fragments.py",
        "                fragment.state, fragment.was_lost = FragmentState.QUEUED, True",
        "                pass",
    ),
    Mutation(
        "fragment k + 1 is written over fragment k",
        "engine/collecting/fragments.py",
        "if side not in used), None)",
        "if side >= 0), None)",
    ),
    Mutation(
        "fragments for a later batch change places",
        "engine/collecting/fragments.py",
        "self._arrived.appendleft(fragment)",
        "self._arrived.append(fragment)",
    ),
    Mutation(
        "incarnations are read when a batch is put together",
        "collection.py",
        "return Part(worker, slots, side, result, fragment.num_steps, fragment.incarnations,",
        "return Part(worker, slots, side, result, fragment.num_steps, self._driver._state.incarnations_of(slots),",
    ),
    Mutation(
        "workers keep the weights that they loaded first",
        "engine/collecting/weights.py",
        "self._loaded.get(worker) == wanted.number else wanted",
        "worker in self._loaded else wanted",
    ),
    Mutation(
        "weights are written where a worker has yet to read others",
        "engine/collecting/weights.py",
        "if not place.readers and place.number not in used and place.room >= size:",
        "if place.room >= size:",
    ),
    Mutation(
        "a replacement is taken to have the weights of the dead worker",
        "engine/collecting/weights.py",
        '        """Its process is gone: it will not read, and its replacement has loaded nothing."""\n'
        "        self._loaded.pop(worker, None)\n"
        "        for place in self._places:\n"
        "            place.readers = {request: reader for request, reader in place.readers.items() "
        "if reader != worker}\n"
        "\n"
        "    def policy_changed(self, worker: int) -> None:\n"
        '        """Record that the worker is sent a new policy, which discards the weights that it has loaded."""\n'
        "        self._loaded.pop(worker, None)",
        '        """Its process is gone: it will not read, and its replacement has loaded nothing."""\n'
        "        for place in self._places:\n"
        "            place.readers = {request: reader for request, reader in place.readers.items() "
        "if reader != worker}\n"
        "\n"
        "    def policy_changed(self, worker: int) -> None:\n"
        '        """Record that the worker is sent a new policy, which discards the weights that it has loaded."""',
    ),
    Mutation(
        "a pull is never taken to be over",
        "engine/collecting/weights.py",
        "            del machine.transfers[event.number]\n",
        "",
    ),
    Mutation(
        "nobody looks for workers that hang",
        "engine/health.py",
        "if limit_s is not None and stuck_s > limit_s:",
        "if False:",
    ),
    Mutation(
        "final observations belong to the first worker's columns",
        "engine/collecting/assembly.py",
        "final_n.append(result.finals.columns + first)",
        "final_n.append(result.finals.columns)",
    ),
    Mutation(
        "episodes of moved slots do not end",
        "engine/collecting/assembly.py",
        "    side.truncations[t, first + who_ends] = True\n",
        "",
    ),
    Mutation(
        "a reset does not wait for what is under way",
        "driver.py",
        "while any(request.kind is not Kind.CALL for request in self.requests):",
        "while False:",
    ),
    Mutation(
        "a step interrupted by Ctrl-C is delivered to nobody",
        "driver.py",
        "        if STATE.pending:  #",
        "        if False:  #",
    ),
    Mutation(
        "an evaluation skips first rows",
        "collection.py",
        "while not collecting.are_all_there():",
        "while not all([collecting.is_ready(w) for w in range(len(driver.slots_of))]):",
    ),
    Mutation(
        "recv is allowed when nothing is in flight",
        "vector/phases.py",
        'Phase.IDLE: {**_NO_ASYNC, "recv": _NOTHING},',
        "Phase.IDLE: _NO_ASYNC,",
    ),
    Mutation(
        "whole returns of episodes whose beginning was stepped",
        "worker/fragment_loop.py",
        "elif run.was_stepped:",
        "elif False:",
    ),
    Mutation(
        "the head polls without a pause while a node is missing",
        "engine/engine.py",
        "if due_s > now_s), default=None)",
        "), default=None)",
    ),
    Mutation(
        "a rollout does not report a fragment that waits to run again",
        "engine/collecting/fragments.py",
        "is_lost = fragment.was_lost and fragment.state is FragmentState.QUEUED",
        "is_lost = False",
    ),
    Mutation(
        "the loss of a late fragment is forgotten",
        "engine/collecting/fragments.py",
        'elif self.on_loss == "mask" or fragment.is_late:',
        "elif fragment.is_late:\n                self._of[worker].remove(fragment)\n"
        "            elif self.on_loss != 'rerun':",
    ),
    Mutation(
        "a reset of some slots hides the rows of an interrupted step",
        "vector/async_calls.py",
        "if guard.was_interrupted:",
        "if False:",
    ),
    Mutation(
        "a lost episode ends with an observation that was never delivered",
        "engine/failures.py",
        "state.rows.restore_last_obs(worker.slots)",
        "pass",
    ),
    Mutation(
        "the reset of a vector environment's slot is a row",
        "worker/vector_fragment.py",
        "begun = group.over[where].copy()  # this step was only their reset",
        "begun = np.zeros(len(rows), dtype=np.bool_)",
    ),
    Mutation(
        "a vector environment that fails does not end the other columns",
        "worker/vector_fragment.py",
        "        columns.truncations[t, k] = True\n        run.finals.append((t, k, columns.row(t + 1, k)))",
        "        return",
    ),
    Mutation(
        "noise of a column that is behind is that of another row",
        "worker/vector_fragment.py",
        "at.own[where] += len(self._every) * live",
        "pass",
    ),
]

_LOOK = """
import signal, sys, time
from simulation.schedule import run

def stop(number, frame):
    raise RuntimeError("a schedule does not end")

signal.signal(signal.SIGPROF, stop)
limit, seed = float(sys.argv[1]), 0
while time.process_time() < limit:
    signal.setitimer(signal.ITIMER_PROF, 10.0)  # ends a loop without a wait
    failure = run(seed).failure
    seed += 1
    if failure is not None:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(f"{time.process_time():.1f}\\t{seed}\\t{failure.splitlines()[0][:110]}")
        break
else:
    signal.setitimer(signal.ITIMER_PROF, 0.0)  # else it ends the exit of the interpreter
    print(f"{time.process_time():.1f}\\t{seed}\\t")
"""


def look(mutation: Mutation, seconds: float) -> tuple[bool, str]:
    """Return whether simulated runs find this defect, and a line for the report."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "clusterenv"
        shutil.copytree(ROOT / "src" / "clusterenv", package, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(SIMULATION, Path(folder) / "simulation", ignore=shutil.ignore_patterns("__pycache__"))
        file = package / mutation.file
        text = file.read_text()
        if mutation.old not in text:
            return False, f"NOT PLANTED  {mutation.name}: {mutation.file} has changed"
        file.write_text(text.replace(mutation.old, mutation.new, 1))
        env = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-c", _LOOK, str(seconds)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=20 * seconds + 120)
    if done.returncode:
        return True, f"found        {mutation.name}: {done.stderr.strip().splitlines()[-1][:110]}"
    cpu_s, seeds, failure = done.stdout.rstrip("\n").split("\t")
    if not failure:
        return False, f"NOT FOUND    {mutation.name}: {seeds} schedules in {cpu_s} s"
    return True, f"found        {mutation.name}: {cpu_s} s, {seeds} schedules: {failure}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="CPU time for each defect")
    parser.add_argument("--only", default="", help="only defects whose name contains this text")
    parser.add_argument("--skip", type=int, default=0, help="number of these defects to skip")
    options = parser.parse_args()
    chosen = [mutation for mutation in MUTATIONS if options.only in mutation.name][options.skip :]
    found = 0
    for mutation in chosen:
        is_found, line = look(mutation, options.seconds)
        found += is_found
        print(line, flush=True)
    print(f"{found} of {len(chosen)} found")
    return 0 if found == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
