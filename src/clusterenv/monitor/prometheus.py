"""Write what is known about a run in Prometheus' text format: `render(info, sample)`.

The page serves it at `/metrics`. Slots have no series of their own: a run may have thousands, and their quantiles show
what matters. A value that is not known has no line.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from clusterenv.monitor.sample import NodeSample, RunInfo, Sample, WorkerSample

__all__ = ["CONTENT_TYPE", "render"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_QUANTILES = (0.0, 0.5, 0.9, 1.0)

Value = float | int | None
Labelled = tuple[Mapping[str, object], Value]


class _Metric(NamedTuple):
    name: str
    kind: str
    """"counter" or "gauge"."""
    help: str
    values: Iterable[Labelled]


def render(info: RunInfo, sample: Sample | None) -> str:
    """Return the metrics of a run; before its first sample, only those that describe it."""
    metrics = list(_of_run(info))
    if sample is not None:
        metrics += [
            *_of_point(sample),
            *_of_slots(sample),
            *_of_nodes(sample.nodes),
            *_of_workers(sample.workers),
        ]
    return "".join(_lines(metric) for metric in metrics)


def _one(value: Value) -> list[Labelled]:
    return [({}, value)]


def _of_run(info: RunInfo) -> Iterator[_Metric]:
    labels = {
        "run": info.name,
        "env": info.env,
        "backend": info.backend,
        "host": info.host,
        "version": info.version,
    }
    yield _Metric("run_info", "gauge", "The run that these metrics describe.", [(labels, 1)])
    yield _Metric("start_time_seconds", "gauge", "Unix time at which the run began.", _one(info.began_at))
    yield _Metric("envs", "gauge", "Number of environments.", _one(info.num_envs))


def _of_point(sample: Sample) -> Iterator[_Metric]:
    point = sample.point
    shares = [({"part": part}, getattr(point, part)) for part in ("environment", "policy", "waiting")]
    kinds: list[Labelled] = [({"kind": kind}, count) for kind, count in sorted(sample.event_counts.items())]
    yield _Metric("sample_time_seconds", "gauge", "Unix time of these numbers.", _one(point.time_s))
    yield _Metric("over", "gauge", "1 if the run has ended.", _one(int(sample.is_over)))
    yield _Metric(
        "call_seconds",
        "gauge",
        'Time since the script entered this call; call="": since it left the last one.',
        [({"call": sample.call}, sample.call_s)],
    )
    yield _Metric("steps_total", "counter", "Environment steps.", _one(point.steps))
    yield _Metric("steps_per_second", "gauge", "Environment steps per second.", _one(point.steps_per_s))
    yield _Metric("time_share", "gauge", "Share of the workers' time, by what they do.", shares)
    yield _Metric("episodes_total", "counter", "Finished episodes.", _one(point.episodes))
    yield _Metric("episode_return", "gauge", "Mean return of the last 100 episodes.", _one(point.episode_return))
    yield _Metric("episode_length", "gauge", "Mean length of the last 100 episodes.", _one(point.episode_length))
    yield _Metric("version", "gauge", "Newest version of the weights.", _one(point.version))
    yield _Metric("held_version", "gauge", "Oldest version that a node acts with.", _one(point.held_version))
    yield _Metric("drift", "gauge", "Mean KL of the policy that acts from the newest one.", _one(point.drift))
    yield _Metric("drift_standard_error", "gauge", "Standard error of the drift.", _one(point.drift_se))
    yield _Metric("drift_threshold", "gauge", "Drift above which weights are pulled.", _one(point.threshold))
    yield _Metric("pulls_total", "counter", "Pulls of weights by nodes.", _one(point.pulls))
    yield _Metric("weight_bytes_total", "counter", "Bytes of weights sent.", _one(point.weight_bytes))
    yield _Metric(
        "pushed_bytes_total",
        "counter",
        "Bytes that the rule Always, with whole weights, would have sent at the same requests.",
        _one(point.pushed_bytes),
    )
    yield _Metric("fragment_bytes_total", "counter", "Bytes of fragments received.", _one(point.fragment_bytes))
    yield _Metric("sent_bytes_total", "counter", "Bytes that the head sent.", _one(point.sent_bytes))
    yield _Metric("received_bytes_total", "counter", "Bytes that the head received.", _one(point.received_bytes))
    yield _Metric("invalid_rows_total", "counter", "Rows that were lost and masked.", _one(point.invalid_rows))
    yield _Metric(
        "losses_total", "counter", "Worker processes that ended and environments that failed.", _one(point.losses)
    )
    yield _Metric("events_total", "counter", "Events by kind.", kinds)
    yield _Metric("head_cpu_ratio", "gauge", "Share of the head's cores that is busy.", _one(point.cpu))
    yield _Metric("head_memory_bytes", "gauge", "Resident memory of the head's process.", _one(point.memory))


def _of_slots(sample: Sample) -> Iterator[_Metric]:
    times = sorted(time for time in sample.step_s if time > 0)
    quantiles: list[Labelled] = [
        ({"quantile": f"{share:g}"}, times[round(share * (len(times) - 1))]) for share in _QUANTILES if times
    ]
    restarted = sum(count > 0 for count in sample.incarnations)
    yield _Metric("slot_step_seconds", "gauge", "Quantiles over the slots of the time for one step.", quantiles)
    yield _Metric("slow_slots", "gauge", "Slots that are much slower than the others.", _one(len(sample.slow)))
    yield _Metric("restarted_slots", "gauge", "Slots whose environment was made again.", _one(restarted))


def _of_nodes(nodes: list[NodeSample]) -> Iterator[_Metric]:
    def each(name: str) -> list[Labelled]:
        return [({"node": node.node}, getattr(node, name)) for node in nodes]

    def host(name: str) -> list[Labelled]:
        return [({"node": node.node}, getattr(node.host, name)) for node in nodes if node.host is not None]

    described: list[Labelled] = [({"node": node.node, "host": node.host_name, "job": node.job}, 1) for node in nodes]
    joined: list[Labelled] = [({"node": node.node}, int(node.state == "joined")) for node in nodes]
    forms: list[Labelled] = [
        ({"node": node.node, "codec": codec}, count) for node in nodes for codec, count in sorted(node.forms.items())
    ]
    lags: list[Labelled] = [
        ({"node": node.node, "lag": lag}, count) for node in nodes for lag, count in sorted(node.lags.items())
    ]
    yield _Metric("node_info", "gauge", "Host and job of a node.", described)
    yield _Metric("node_joined", "gauge", "1 if the node takes part.", joined)
    yield _Metric("node_time_left_seconds", "gauge", "Until the scheduler ends its job.", each("time_left_s"))
    yield _Metric("node_silent_seconds", "gauge", "Since its last message.", each("silent_s"))
    yield _Metric("node_cpu_ratio", "gauge", "Share of its cores that is busy.", host("cpu"))
    yield _Metric("node_memory_used_bytes", "gauge", "Used memory of the machine.", host("memory_used"))
    yield _Metric("node_memory_total_bytes", "gauge", "Memory of the machine.", host("memory_total"))
    yield _Metric("node_throttled_ratio", "gauge", "Share of CPU periods with throttling.", host("throttled"))
    yield _Metric("node_sent_bytes_total", "counter", "Bytes sent to the node.", each("sent_bytes"))
    yield _Metric("node_received_bytes_total", "counter", "Bytes received from the node.", each("received_bytes"))
    yield _Metric("node_version", "gauge", "Version of the weights that the node has.", each("version"))
    yield _Metric("node_drift", "gauge", "Drift of the policy that acts on the node.", each("drift"))
    yield _Metric("node_weight_bytes_total", "counter", "Bytes of weights sent to the node.", each("weight_bytes"))
    yield _Metric("node_pulls_total", "counter", "Pulls of weights by codec.", forms)
    yield _Metric("node_fragments_total", "counter", "Fragments by versions behind the newest.", lags)


def _of_workers(workers: list[WorkerSample]) -> Iterator[_Metric]:
    def each(name: str) -> list[Labelled]:
        return [({"worker": worker.worker, "node": worker.node}, getattr(worker, name)) for worker in workers]

    states = Counter(worker.state for worker in workers)
    counts: list[Labelled] = [({"state": state}, states[state]) for state in ("running", "absent", "killed")]
    yield _Metric("workers", "gauge", "Worker processes by state.", counts)
    yield _Metric("worker_steps_per_second", "gauge", "Steps per second of a worker.", each("steps_per_s"))
    yield _Metric("worker_stuck_seconds", "gauge", "Time without progress during a request.", each("stuck_s"))
    yield _Metric("worker_losses_total", "counter", "Ends of its process and failed environments.", each("losses"))


def _lines(metric: _Metric) -> str:
    name = f"clusterenv_{metric.name}"
    lines = [f"{name}{_labels(labels)} {_number(value)}\n" for labels, value in metric.values if value is not None]
    if not lines:
        return ""
    return f"# HELP {name} {_escape_help(metric.help)}\n# TYPE {name} {metric.kind}\n" + "".join(lines)


def _labels(labels: Mapping[str, object]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(str(value))}"' for name, value in labels.items()) + "}"


def _escape(text: str) -> str:
    # Bytes that are no UTF-8 reach names of hosts and files as lone surrogates, which nothing can encode.
    text = text.encode("utf-8", "backslashreplace").decode()
    return _escape_help(text).replace('"', '\\"')


def _escape_help(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
