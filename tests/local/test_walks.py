"""`make tour`: a traced walk sees the head and its workers together."""

from __future__ import annotations

import pytest

from tools.walks import WALKS, documented, trace


@pytest.mark.parametrize("name", WALKS)
def test_the_docs_name_what_is_called(name: str) -> None:
    crossed = trace(name)
    named = documented(name)
    assert len(named) >= 10
    assert [one for one in named if not any(each.is_called(one) for each in crossed)] == []


def test_a_local_step_is_seen_in_the_head_and_in_the_worker() -> None:
    crossed = trace("a local step")
    names = {each.name for each in crossed}
    assert {"ClusterEnv.step", "EnvGroup.step_all"} <= names
    assert "ClusterEnv.reset" not in names  # before the walk
    assert "ClusterEnv.close" not in names  # after it
