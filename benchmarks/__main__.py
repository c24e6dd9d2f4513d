"""Measure every subject in interleaved rounds and print the tables: `python -m benchmarks`.

Enters: the command line. Leaves: Markdown on stdout, progress on stderr, figures and tables in `runs/bench`.
Each measurement is a separate process (`subjects.py`, or `collectors.py` if a policy acts), so that no subject inherits
the threads, the memory or the imports of another.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks import start as first_batch
from benchmarks.tables import (
    COLLECTORS,
    PULLS,
    SIMULATORS,
    STREAMS,
    TABLES,
    Results,
    Series,
    Table,
    goals_markdown,
    goals_summary,
    summary,
    table_markdown,
)
from benchmarks.venvs import ROOT, Missing, interpreter, why
from clusterenv.system.cpus import usable_cores

SUBJECTS_FILE = Path("benchmarks") / "subjects.py"
COLLECTORS_FILE = Path("benchmarks") / "collectors.py"
STREAMS_FILE = Path("benchmarks") / "streams.py"
PULLS_FILE = Path("benchmarks") / "pulls.py"
FILES = {**dict.fromkeys(COLLECTORS, COLLECTORS_FILE), **dict.fromkeys(STREAMS, STREAMS_FILE)}
FILES |= dict.fromkeys(PULLS, PULLS_FILE)
FILES |= dict.fromkeys(SIMULATORS, Path("benchmarks") / "simulators.py")
OUTPUT = ROOT / "runs" / "bench"
START_AND_STOP_S = 300  # making a thousand Atari games takes two minutes
WARMUP_S = 0.5
START = "start"
"""Name of the section that `start.py` measures."""
START_ROUNDS = 3  # with torch in 16 workers, one round takes most of a minute


def main() -> None:
    args = parse_args()
    tables = [table for table in TABLES if args.only is None or table.name in args.only]
    started = datetime.now(UTC)
    results: Results = {table.name: {subject: Series() for subject in table.subjects} for table in tables}
    machine = describe_machine()
    versions: dict[str, dict[str, str]] = {}

    pythons = find_interpreters(tables)
    for round_ in range(1, args.rounds + 1):
        for table in tables:
            for subject in table.subjects:
                series = results[table.name][subject]
                if series.failure is not None:
                    continue  # it would only cost its timeout again
                where = f"round {round_}/{args.rounds}  {table.name}  {subject}"
                outcome = measure(pythons[subject], subject, table, args.workers, args.seconds)
                if isinstance(outcome, Missing):
                    series.failure = outcome.reason
                    say(f"{where}: {outcome.reason}")
                else:
                    series.rates.append(outcome["steps_per_s"])
                    versions[subject] = outcome["versions"]
                    say(f"{where}: {series.rates[-1]:,.0f} {table.unit}")

    settings = {"rounds": args.rounds, "seconds": args.seconds, "warmup_s": WARMUP_S, "workers": args.workers}
    record: dict[str, Any] = {
        "started": started.isoformat(timespec="seconds"),
        "machine": machine,
        "settings": settings,
        "versions": versions,
        "figures": summary(results, tables),
        "goals": goals_summary(results, tables),
    }
    sections = [
        header(machine, settings, versions),
        *(table_markdown(table, results, args.workers) for table in tables),
        goals_markdown(results, tables),
    ]
    if args.only is None or START in args.only:
        counts = [4] if args.quick else [4, 16]
        starts = first_batch.measure_all(min(args.rounds, START_ROUNDS), counts)
        record["start"] = {f"{policy}, {workers} workers": rounds for (policy, workers), rounds in starts.items()}
        sections.append(first_batch.markdown(starts, counts))
    text = "\n\n".join(sections)
    print(text)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    stem = started.strftime("%Y%m%dT%H%M%SZ")
    (OUTPUT / f"{stem}.json").write_text(json.dumps(record, indent=2) + "\n")
    (OUTPUT / f"{stem}.md").write_text(text + "\n")
    say(f"written: {(OUTPUT / stem).relative_to(ROOT)}.json and .md")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="duration of each measurement, after the warm-up")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="processes, actors or threads of each subject")
    parser.add_argument("--quick", action="store_true", help="one round of half a second, to see that everything runs")
    names = [*(table.name for table in TABLES), START]
    parser.add_argument("--only", nargs="+", choices=names, metavar="TABLE", help=f"any of {', '.join(names)}")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.seconds = 1, 0.5
    if args.rounds < 1 or args.workers < 1 or args.seconds <= 0:
        parser.error("--rounds and --workers have to be at least 1, and --seconds more than 0")
    return args


def find_interpreters(tables: list[Table]) -> dict[str, Path | Missing]:
    subjects = dict.fromkeys(subject for table in tables for subject in table.subjects)
    pythons = {}
    for subject in subjects:
        say(f"preparing {subject}")
        pythons[subject] = interpreter(subject)
    return pythons


def start(python: Path, subject: str, table: Table, workers: int, seconds: float, *more: str) -> subprocess.Popen[str]:
    """Start one subject in its own process group."""
    command = [str(python), str(FILES.get(subject, SUBJECTS_FILE)), subject, table.env_id, *more]
    command += ["--num-envs", str(table.num_envs), "--workers", str(table.workers or workers)]
    command += ["--seconds", str(seconds), "--warmup", str(WARMUP_S)]
    # PYTHONPATH reaches the workers of every subject, which load the synthetic environments by name.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # else a source tree would be compiled at every start
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def measure(
    python: Path | Missing, subject: str, table: Table, workers: int, seconds: float
) -> dict[str, Any] | Missing:
    """Run one subject once, and return the outcome that it printed."""
    if isinstance(python, Missing):
        return python
    process = start(python, subject, table, workers, seconds)
    timeout_s = WARMUP_S + seconds + START_AND_STOP_S
    try:
        output, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        kill_group(process)
        return Missing(f"no end after {timeout_s:.0f} s")
    except BaseException:
        kill_group(process)
        raise
    lines = output.strip().splitlines()
    if process.returncode != 0 or not lines:
        return Missing(why(errors))
    return json.loads(lines[-1])


def kill_group(process: subprocess.Popen[str]) -> None:
    """Kill the subject and its workers. It has not been waited for, so its group's number cannot have been reused."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def describe_machine() -> dict[str, Any]:
    """Return what a reader needs to judge the figures, and nothing that identifies the machine."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        cpuinfo = []
    models = [line.split(":", 1)[1].strip() for line in cpuinfo if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": usable_cores(),
        "system": platform.system(),
        "python": platform.python_version(),
        "load_at_start": round(os.getloadavg()[0], 2),
    }


def header(machine: dict[str, Any], settings: dict[str, Any], versions: dict[str, dict[str, str]]) -> str:
    packages = sorted({f"{name} {version}" for loaded in versions.values() for name, version in loaded.items()})
    return "\n".join(
        [
            "# Environment steps per second",
            "",
            f"{machine['cpu']}, {machine['cores']} cores, load {machine['load_at_start']} at the start. "
            f"{settings['rounds']} interleaved rounds of {settings['seconds']:g} s, each after a warm-up of "
            f"{settings['warmup_s']:g} s; ratios are of the medians. {', '.join(packages)}.",
        ]
    )


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
