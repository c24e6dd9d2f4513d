"""Define the comparisons and goals, and turn figures into tables, ratios and verdicts.

Enters: `Results`, the rates that the runner collected. Leaves: Markdown and plain dicts. Nothing is run here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

LIMIT = "limit"
PEERS = ("sync", "async", "subproc", "ray", "envpool")
PEER_COLLECTORS = ("cleanrl-sync", "cleanrl-async", "rllib", "torchrl")
COLLECTORS = ("clusterenv-collect", "clusterenv-collect-network", *PEER_COLLECTORS)
"""Subjects of `collectors.py`, which act with a policy."""
STREAMS = ("stream-learn", "rollout-learn", "stream-uneven", "stream-alone")
"""Subjects of `streams.py`."""
PULLS = ("pull", "raw-copy")
"""Subjects of `pulls.py`."""
OVER_ENVPOOL = ("bare-envpool", "collect-envpool", "collect-envpool-network")
SIMULATORS = (*OVER_ENVPOOL, "collect-atari", "bare-atari", "torchrl-envpool")
"""Subjects of `simulators.py`."""
ACTING = (
    "A 64-64 tanh policy, a torch module that ours exports, acts; sampled actions and their log-probabilities, in "
    "rollouts of 128 steps."
)
LABELS = {
    LIMIT: "limit: a bare loop per worker, nothing sent",
    "clusterenv": "**clusterenv**, `step`",
    "clusterenv-network": "**clusterenv**, `step`, a node agent per worker",
    "clusterenv-recv": "**clusterenv**, `send`/`recv`",
    "clusterenv-envpool": "**clusterenv**, EnvPool in the workers",
    "sync": "Gymnasium SyncVectorEnv",
    "async": "Gymnasium AsyncVectorEnv, a process each",
    "subproc": "SB3 SubprocVecEnv, a process each",
    "ray": "Ray, a SyncVectorEnv in an actor per worker",
    "envpool": "EnvPool alone (C++ environments), a thread per worker",
    "clusterenv-collect": "**clusterenv**, `collector.rollout`",
    "clusterenv-collect-network": "**clusterenv**, `collector.rollout`, a node agent per worker",
    "cleanrl-sync": "CleanRL's loop on SyncVectorEnv",
    "cleanrl-async": "CleanRL's loop on AsyncVectorEnv, a process each",
    "rllib": "RLlib, an EnvRunner per worker",
    "torchrl": "TorchRL MultiAsyncCollector, a SyncVectorEnv per worker",
    "collect-envpool": "**clusterenv**, `collector.rollout`, EnvPool in the workers",
    "collect-envpool-network": "**clusterenv**, `collector.rollout`, EnvPool, a node agent per worker",
    "collect-atari": "**clusterenv**, `collector.rollout`, ale-py's vector environment in the workers",
    "bare-envpool": "EnvPool, a bare loop that acts and records: the best of threads, sync and async, torch and ONNX",
    "bare-atari": "ale-py's vector environment, a bare loop: the best of threads, torch and ONNX",
    "torchrl-envpool": "TorchRL over its EnvPool wrapper, a thread per worker",
    "pull": "**clusterenv**, a node pulls a policy",
    "raw-copy": "as many bytes over one encrypted ZeroMQ connection",
    "stream-learn": "**clusterenv**, `collector.stream` and learning",
    "rollout-learn": "`collector.rollout` and learning in turn",
    "stream-uneven": "**clusterenv**, `collector.stream`, one worker slow",
    "stream-alone": "the same workers, one after the other, their rates added",
}


@dataclass(frozen=True)
class Table:
    """One comparison: these subjects, on this environment, at this size."""

    name: str
    env_id: str
    num_envs: int
    subjects: tuple[str, ...]
    ours: str = "clusterenv"
    workers: int | None = None
    """Number of workers; None: from the command line."""
    note: str = ""
    """A remark for the reader, printed after the size."""
    unit: str = "steps/s"


@dataclass(frozen=True)
class Goal:
    table: str
    ours: str
    over: str
    at_least: float


@dataclass
class Series:
    """The rates of one subject in one table, one per round, and the reason if it failed."""

    rates: list[float] = field(default_factory=list)
    failure: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.rates) if self.rates else None


Results = dict[str, dict[str, Series]]
"""Table name → subject → series."""

ACTORS = (LIMIT, "clusterenv-collect", *PEER_COLLECTORS)
WITH_CNN = "The Nature CNN acts; rollouts of 32 steps."
WITH_CNN_MANY = "The Nature CNN acts; rollouts of 4 steps."
NETWORK = "Two node agents on loopback, everything encrypted, against shared memory."
TABLES = (
    Table("CartPole-v1", "CartPole-v1", 64, (LIMIT, "clusterenv", *PEERS)),
    Table("LunarLander-v3", "LunarLander-v3", 64, (LIMIT, "clusterenv", *PEERS)),
    Table("pixels", "bench/Pixels-v0", 64, (LIMIT, "clusterenv", "async", "sync")),
    Table("envpool-1024", "CartPole-v1", 1024, ("clusterenv-envpool", "envpool"), ours="clusterenv-envpool"),
    Table(
        "stragglers",
        "bench/Stragglers-v0",
        16,
        ("clusterenv-recv", "clusterenv"),
        ours="clusterenv-recv",
        workers=16,
    ),
    Table("collect-CartPole-v1", "CartPole-v1", 64, ACTORS, ours="clusterenv-collect", note=ACTING),
    Table("collect-LunarLander-v3", "LunarLander-v3", 64, ACTORS, ours="clusterenv-collect", note=ACTING),
    Table("envpool-CartPole-64", "CartPole-v1", 64, OVER_ENVPOOL, ours="collect-envpool", note=ACTING),
    Table("envpool-CartPole-1024", "CartPole-v1", 1024, OVER_ENVPOOL, ours="collect-envpool", note=ACTING),
    Table(
        "envpool-LunarLander-64",
        "LunarLander-v3",
        64,
        (*OVER_ENVPOOL, "torchrl-envpool", "rllib"),
        ours="collect-envpool",
        note=ACTING,
    ),
    Table("envpool-LunarLander-1024", "LunarLander-v3", 1024, OVER_ENVPOOL, ours="collect-envpool", note=ACTING),
    Table("envpool-Pong-64", "Pong-v5", 64, OVER_ENVPOOL, ours="collect-envpool", note=WITH_CNN),
    Table("envpool-Pong-1024", "Pong-v5", 1024, OVER_ENVPOOL, ours="collect-envpool", note=WITH_CNN_MANY),
    Table("atari-64", "ALE/Pong-v5", 64, ("bare-atari", "collect-atari"), ours="collect-atari", note=WITH_CNN),
    Table(
        "network-step",
        "LunarLander-v3",
        64,
        ("clusterenv-network", "clusterenv"),
        ours="clusterenv-network",
        note=NETWORK,
    ),
    Table(
        "network-collect",
        "LunarLander-v3",
        64,
        ("clusterenv-collect-network", "clusterenv-collect"),
        ours="clusterenv-collect-network",
        note=NETWORK,
    ),
    Table(
        "network-pull",
        "CartPole-v1",
        1,
        ("pull", "raw-copy"),
        ours="pull",
        workers=1,
        note="Weights of 100 MB, on loopback, encrypted.",
        unit="bytes/s",
    ),
    Table(
        "stream-learn",
        "LunarLander-v3",
        32,
        ("stream-learn", "rollout-learn"),
        ours="stream-learn",
        workers=1,
        note="Learning (gradient steps, on a core of its own) takes as long as collecting.",
    ),
    Table(
        "stream-uneven",
        "CartPole-v1",
        16,
        ("stream-uneven", "stream-alone"),
        ours="stream-uneven",
        workers=4,
        note="Environments sleep 1 ms a step, those of one worker 5 ms.",
    ),
)

GOALS = (
    Goal("LunarLander-v3", "clusterenv", LIMIT, 0.80),
    Goal("CartPole-v1", "clusterenv", LIMIT, 0.60),
    Goal("LunarLander-v3", "clusterenv", "async", 8.0),
    Goal("LunarLander-v3", "clusterenv", "subproc", 8.0),
    Goal("LunarLander-v3", "clusterenv", "ray", 3.0),
    Goal("LunarLander-v3", "clusterenv", "sync", 1.8),
    Goal("pixels", "clusterenv", "async", 3.0),
    Goal("envpool-1024", "clusterenv-envpool", "envpool", 0.9),
    Goal("stragglers", "clusterenv-recv", "clusterenv", 1.5),
    Goal("collect-LunarLander-v3", "clusterenv-collect", LIMIT, 0.85),
    Goal("collect-CartPole-v1", "clusterenv-collect", LIMIT, 0.60),
    Goal("collect-LunarLander-v3", "clusterenv-collect", "rllib", 3.0),
    Goal("collect-LunarLander-v3", "clusterenv-collect", "torchrl", 6.0),
    Goal("collect-LunarLander-v3", "clusterenv-collect", "cleanrl-async", 3.0),
    Goal("collect-LunarLander-v3", "clusterenv-collect", "cleanrl-sync", 1.8),
    *(
        Goal(f"envpool-{name}", "collect-envpool", "bare-envpool", 0.9)
        for name in ("CartPole-64", "CartPole-1024", "LunarLander-64", "LunarLander-1024", "Pong-64", "Pong-1024")
    ),
    Goal("envpool-LunarLander-64", "collect-envpool", "torchrl-envpool", 1.5),
    Goal("envpool-LunarLander-64", "collect-envpool", "rllib", 3.0),
    Goal("envpool-LunarLander-64", "collect-envpool-network", "collect-envpool", 0.85),
    Goal("envpool-Pong-64", "collect-envpool-network", "collect-envpool", 0.85),
    Goal("atari-64", "collect-atari", "bare-atari", 0.9),
    Goal("network-step", "clusterenv-network", "clusterenv", 0.7),
    Goal("network-collect", "clusterenv-collect-network", "clusterenv-collect", 0.9),
    Goal("network-pull", "pull", "raw-copy", 1 / 1.3),
    Goal("stream-learn", "stream-learn", "rollout-learn", 1.3),
    Goal("stream-uneven", "stream-uneven", "stream-alone", 0.9),
)


def ratio(results: Results, table: str, subject: str, over: str) -> float | None:
    """Return the ratio of the medians; None if either was not measured."""
    series = results.get(table, {})
    above = series.get(subject, Series()).median
    below = series.get(over, Series()).median
    if above is None or not below:
        return None
    return above / below


def table_markdown(table: Table, results: Results, workers: int) -> str:
    lines = [
        f"## {table.name}",
        "",
        f"{table.env_id}, {table.num_envs} environments, {table.workers or workers} workers. {table.note}".rstrip(),
        "",
        f"| subject | median {table.unit} | min-max | of the limit | {table.ours} is |",
        "|---|---:|---:|---:|---:|",
    ]
    failures = []
    for subject in table.subjects:
        series = results.get(table.name, {}).get(subject, Series(failure="not run"))
        of_limit = ratio(results, table.name, subject, LIMIT)
        ours = ratio(results, table.name, table.ours, subject)
        lines.append(_row(LABELS[subject], series, of_limit, None if subject == table.ours else ours))
        if series.failure is not None:
            failures.append(f"- {subject}: missing after {len(series.rates)} rounds: {series.failure}")
    return "\n".join([*lines, *(["", *failures] if failures else [])])


def goals_markdown(results: Results, tables: Iterable[Table]) -> str:
    """Return a verdict for every goal of the selected tables."""
    names = {table.name for table in tables}
    lines = ["## Goals", "", "| goal | measured | |", "|---|---:|---|"]
    for goal in GOALS:
        if goal.table in names:
            measured = ratio(results, goal.table, goal.ours, goal.over)
            text = f"{goal.table}: {goal.ours} ≥ {goal.at_least:.2f} x {goal.over}"
            lines.append(f"| {text} | {_times(measured)} | {verdict(measured, goal.at_least)} |")
    return "\n".join(lines)


def verdict(measured: float | None, at_least: float) -> str:
    if measured is None:
        return "NOT MEASURED"
    return "PASS" if measured >= at_least else "FALLS SHORT"


def summary(results: Results, tables: Iterable[Table]) -> list[dict[str, Any]]:
    """Return the figures for JSON: one record per subject, with every round's rate."""
    return [
        {
            "table": table.name,
            "env_id": table.env_id,
            "num_envs": table.num_envs,
            "subject": subject,
            "rates": series.rates,
            "median": series.median,
            "of_limit": ratio(results, table.name, subject, LIMIT),
            "ours_over_it": ratio(results, table.name, table.ours, subject),
            "failure": series.failure,
        }
        for table in tables
        for subject, series in results.get(table.name, {}).items()
    ]


def goals_summary(results: Results, tables: Iterable[Table]) -> list[dict[str, Any]]:
    names = {table.name for table in tables}
    measured = [(goal, ratio(results, goal.table, goal.ours, goal.over)) for goal in GOALS if goal.table in names]
    return [
        {
            "table": goal.table,
            "ours": goal.ours,
            "over": goal.over,
            "at_least": goal.at_least,
            "measured": value,
            "verdict": verdict(value, goal.at_least),
        }
        for goal, value in measured
    ]


def _row(label: str, series: Series, of_limit: float | None, ours: float | None) -> str:
    if series.median is None:
        return f"| {label} | missing | | | |"
    spread = f"{min(series.rates):,.0f}-{max(series.rates):,.0f}"
    return f"| {label} | {series.median:,.0f} | {spread} | {_plain(of_limit)} | {_times(ours)} |"


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"
