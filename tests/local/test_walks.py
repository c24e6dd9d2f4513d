"""`make tour`: a traced walk sees the head and its workers together."""

from __future__ import annotations

from tools.walks import trace


def test_a_local_step_is_seen_in_the_head_and_in_the_worker() -> None:
    crossed = trace("a local step")
    names = {each.name for each in crossed}
    assert {"ClusterEnv.step", "EnvGroup.step_all"} <= names
    assert "ClusterEnv.reset" not in names  # before the walk
    assert "ClusterEnv.close" not in names  # after it
    assert any(each.is_entered for each in crossed) and not all(each.is_entered for each in crossed)
