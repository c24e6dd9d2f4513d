"""Rules about links and weights: slow links, workers that wait for weights, weights that stay old. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from clusterenv.monitor.doctor import thresholds as at
from clusterenv.monitor.doctor.findings import Cause, Evidence, Finding, Severity, Subject
from clusterenv.monitor.doctor.window import Window, median
from clusterenv.monitor.sample import NodeSample

__all__ = ["never_published", "slow_links", "stale_weights"]


class _Link(NamedTuple):
    """What the link of one node costs."""

    node: int
    gap_s: float
    """Median time per fragment that was neither environment nor policy, and (below) its share of the whole."""
    share: float
    bytes_per_s: float
    """While something was awaited."""
    weights: float
    """Share of the bytes that were weights."""
    sent: float


def slow_links(window: Window, skipped: Collection[int]) -> Iterator[Finding]:
    """Find nodes whose fragments spend their time on the way.

    Args:
        skipped: workers whose fragments are late for another reason.
    """
    measured = [link for node in window.nodes.values() if (link := _link(window, node, skipped)) is not None]
    found = [link for link in measured if link.share >= at.LINK_SHARE and link.gap_s >= at.LINK_S]
    if len(found) > 1 and len(found) == len(window.nodes):
        worst = max(found, key=lambda link: link.gap_s)
        if max(link.gap_s for link in found) < 3 * min(link.gap_s for link in found):
            yield _slow_link(window, worst, Subject(), list(window.workers), "the links of all nodes")
            return
    for link in found:
        workers, name = window.workers_on(link.node), f"the link of node {link.node}"
        yield _slow_link(window, link, Subject("node", link.node), workers, name)


def _link(window: Window, node: NodeSample, skipped: Collection[int]) -> _Link | None:
    paces = [window.paces[w] for w in window.workers_on(node.node) if w in window.paces and w not in skipped]
    if not paces or node.sent_bytes + node.received_bytes == 0:
        return None
    work_s = median(pace.work_s for pace in paces) or 0.0
    gap_s = median(pace.gap_s for pace in paces) or 0.0
    # Answers are read only within calls: the learner's share of the time is not the link's.
    gap_s = max(0.0, gap_s - (1 - window.in_call) * (gap_s + work_s))
    series = window.of_node(node.node, window.samples)
    span_s = window.span_s()
    moved = sum(max(0, getattr(series[-1], n) - getattr(series[0], n)) for n in ("sent_bytes", "received_bytes"))
    weights = max(0, series[-1].weight_bytes - series[0].weight_bytes)
    share = gap_s / (gap_s + work_s) if gap_s > 0 else 0.0
    rate = moved / span_s / share if span_s > 0 and share > 0 else 0.0
    return _Link(node.node, gap_s, share, rate, min(1.0, weights / moved) if moved else 0.0, moved)


def _slow_link(window: Window, link: _Link, subject: Subject, workers: list[int], name: str) -> Finding:
    evidence: Evidence = {
        "wait_per_fragment_s": round(link.gap_s, 3),
        "wait_share": round(link.share, 2),
        "bytes_per_s": round(link.bytes_per_s),
        "weights_share": round(link.weights, 2),
    }
    mostly = "weights" if link.weights > 0.5 else "fragments"
    is_all = len(workers) == len(window.workers)
    lost = link.share if is_all else window.lost_by_worker(link.share)
    if link.bytes_per_s >= at.SLOW_BYTES_PER_S and mostly == "weights":
        return Finding(
            Severity.WARNING,
            Cause.WAITING_FOR_WEIGHTS,
            subject,
            f"workers wait {link.gap_s:.2f} s per fragment, mostly for weights ({link.bytes_per_s / 1e6:.0f} MB/s)",
            "send weights less often, or smaller: sync=APS(...), codec='auto', a stream",
            evidence,
            lost=lost,
            workers=tuple(workers),
        )
    advice = (
        "pull less often and smaller: sync=APS(...), codec='auto'"
        if mostly == "weights"
        else "send less (compress=True, smaller observations), or overlap the transfer: a stream with longer fragments"
    )
    return Finding(
        Severity.WARNING,
        Cause.SLOW_LINK,
        subject,
        f"{name} carries {_rate(link.bytes_per_s)}, mostly {mostly}: a fragment waits {link.gap_s:.2f} s for it "
        f"({link.share:.0%} of its time)",
        advice,
        evidence,
        lost=lost,
        workers=tuple(workers),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s >= 1e6 else f"{bytes_per_s / 1e3:.0f} kB/s"


# -- stale weights ------------------------------------------------------------------------------------------------


def stale_weights(window: Window) -> Iterator[Finding]:
    """Find machines that act with weights far behind the newest, and get no newer ones."""
    newest = window.last.point.version
    if newest is None or newest < 0:
        return
    found = []
    for node in window.nodes.values():
        lag = _stale_lag(window, node, newest)
        if lag is not None:
            found.append((lag, node))
    if found and len(found) == len(window.nodes):
        lag, node = max(found, key=lambda entry: entry[0])
        yield _stale(window, node, lag, Subject(), "the workers act")
        return
    for lag, node in found:
        yield _stale(window, node, lag, Subject("node", node.node), f"the workers of node {node.node} act")


def _stale_lag(window: Window, node: NodeSample, newest: int) -> int | None:
    """Return how many versions a machine is behind, if that is too many."""
    point = window.last.point
    held = node.version if node.version is not None else (point.held_version if len(window.nodes) == 1 else None)
    if held is None or held < 0:
        return None
    lag = newest - held
    series = window.of_node(node.node, window.samples)
    versions = [n.version for n in series if n.version is not None and n.version >= 0]
    if lag < at.STALE_LAG or any(version != held for version in versions) or series[-1].pulls > series[0].pulls:
        return None
    is_first = node.pulls <= 1
    if not is_first and lag < at.USUAL_FACTOR * newest / node.pulls:
        return None
    drift, threshold = node.drift if node.drift is not None else point.drift, point.threshold
    if drift is None or drift != drift:
        return lag
    if drift > (at.HIGH_DRIFT if threshold is None else threshold):
        return lag
    return lag if threshold is None and is_first and lag >= at.STALE_LAG_MEASURED else None


def _stale(window: Window, node: NodeSample, lag: int, subject: Subject, who: str) -> Finding:
    newest = window.last.point.version or 0
    evidence: Evidence = {
        "lag_versions": lag,
        "newest_version": newest,
        "held_version": newest - lag,
        "pulls": node.pulls,
    }
    drift = node.drift if node.drift is not None else window.last.point.drift
    if drift is not None:
        evidence["drift"] = round(drift, 4)
    if window.last.point.threshold is not None:
        evidence["threshold"] = window.last.point.threshold
    return Finding(
        Severity.WARNING,
        Cause.STALE_WEIGHTS,
        subject,
        f"{who} with version {newest - lag}, {lag} behind the newest, and have pulled none for {window.span_s():.0f} s",
        "check the rule: sync=Always() or APS(max_lag=...); Never() and a rule that returns False never pull again",
        evidence,
        workers=tuple(window.workers_on(node.node)) if subject.kind == "node" else tuple(window.workers),
    )


def never_published(window: Window) -> Iterator[Finding]:
    """Find streams whose workers have had the first weights only: a stream publishes nothing by itself."""
    last = window.last.point
    age_s = last.time_s - window.info.began_at
    is_old = age_s >= at.WARM_S and len(window.fragments) >= at.UNPUBLISHED_FRAGMENTS
    if last.version == 0 and last.pulls and is_old and any(s.call == "stream" for s in window.samples):
        yield Finding(
            Severity.WARNING,
            Cause.NEVER_PUBLISHED,
            Subject(),
            f"the workers act with the first weights: none have been published in {age_s:.0f} s of streaming",
            "call collector.publish() after each update of the learner; if the policy is not trained, all is well",
            {"version": 0, "pulls": last.pulls, "fragments": len(window.fragments)},
            lost=1.0,  # of what is learned
            workers=tuple(window.workers),
        )
