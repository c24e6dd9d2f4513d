"""How experiments look into a run, and change what no argument does, without a place for it in the library."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from unittest import mock

from clusterenv.engine.collecting import synchronization
from clusterenv.policy.sync.exchange import Exchange
from clusterenv.policy.sync.rules import Decision, Standing

__all__ = ["sampling_every", "watch_decisions"]


def watch_decisions(exchange: Exchange, heard: Callable[[int, Standing, Decision], None]) -> None:
    """From now on, call `heard(node, standing, decision)` after each decision whether a node pulls."""
    consider = exchange.consider

    def considered(node: int, standing: Standing, max_lag: int | None = None) -> Decision:
        decision = consider(node, standing, max_lag)
        heard(node, standing, decision)
        return decision

    exchange.consider = considered  # type: ignore[method-assign]


@contextlib.contextmanager
def sampling_every(states: int | None) -> Iterator[None]:
    """Within this, collectors sample one state in so many for the drift; None: as many as they would."""
    if states is None:
        yield
        return
    with mock.patch.object(synchronization, "sample_every", lambda _: states):
        yield
