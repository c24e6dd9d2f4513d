"""Whether a node that joins fits the run: versions, pickled code, CPUs. Pure."""

from __future__ import annotations

import sys
from collections.abc import Iterable

import gymnasium

from clusterenv._version import __version__
from clusterenv.code import versions
from clusterenv.wire.messages import PROTOCOL, Hello


def mismatch(hello: Hello, cores: int, sends_pickle: bool, packages: Iterable[str]) -> str | None:
    """Return why a node does not fit a run that needs so many cores of it, and these packages in matching versions."""
    pairs = [
        ("protocol", str(hello.protocol), str(PROTOCOL)),
        ("clusterenv", hello.clusterenv, __version__),
        ("Python", hello.python, ".".join(map(str, sys.version_info[:2]))),
        ("Gymnasium", hello.gymnasium, gymnasium.__version__),
    ]
    wrong = [f"{name} {theirs} there, {ours} here" for name, theirs, ours in pairs if theirs != ours]
    if hello.protocol == PROTOCOL:
        wrong += versions.differences(hello.versions, versions.installed(), packages, sends_pickle)
    if wrong:
        return f"versions differ: {'; '.join(wrong)}. Install the same on both sides"
    if sends_pickle and not hello.allow_pickle:
        return f"{hello.host} takes no pickled code: say allow_pickle=False here, or start it without --no-pickle"
    if hello.cores < cores:
        return (
            f"{hello.host} may use {hello.cores} CPUs (by affinity and control group quotas) for {cores} workers: "
            "ask for fewer workers_per_node or more CPUs, or say oversubscribe=True"
        )
    return None
