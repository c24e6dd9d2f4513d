"""How much memory control groups leave, from made-up files."""

from __future__ import annotations

import pytest

from clusterenv.system.memory import available_bytes, group_memory, machine_memory

GB = 1 << 30


def files(folder: str, limit: object, used: int, stat: str = "") -> dict[str, str]:
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{used}\n",
        f"{folder}/memory.stat": stat,
    }


def test_the_file_cache_counts_as_free() -> None:
    """A group that reads many files uses all of its limit, and gives it back when asked."""
    stat = f"anon {27 * GB}\ninactive_file {60 * GB}\nactive_file {40 * GB}\nfile {101 * GB}\n"
    found = group_memory([("/g", True)], files("/g", 128 * GB, 128 * GB - (100 << 20), stat).get)
    assert found is not None and found == (128 * GB, 28 * GB - (100 << 20))
    assert found.free == 100 * GB + (100 << 20)


def test_the_group_with_the_least_left_counts() -> None:
    texts = {**files("/g", 8 * GB, 7 * GB), **files("/g/job", 4 * GB, 1 * GB), **files("/g/job/step", "max", 1 * GB)}
    assert group_memory([("/g", True), ("/g/job", True), ("/g/job/step", True)], texts.get) == (8 * GB, 7 * GB)
    assert group_memory([("/g/job/step", True), ("/missing", True)], texts.get) is None


def test_groups_of_version_1() -> None:
    stat = f"inactive_file 5\ntotal_inactive_file {GB}\ntotal_active_file {GB}\n"
    texts = {
        "/g/memory.limit_in_bytes": f"{4 * GB}\n",
        "/g/memory.usage_in_bytes": f"{3 * GB}\n",
        "/g/memory.stat": stat,
    }
    assert group_memory([("/g", False)], texts.get) == (4 * GB, GB)


def test_the_machine() -> None:
    text = "MemTotal:       16 kB\nMemFree:         2 kB\nMemAvailable:    8 kB\nHugePages_Total:       0\n"
    assert machine_memory({"/proc/meminfo": text}.get) == (16 << 10, 8 << 10)
    assert machine_memory({}.get) == (0, 0)


def test_what_new_processes_may_use_is_the_least_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clusterenv.system.memory.machine_memory", lambda: (64 * GB, 32 * GB))
    groups = [("/g", True)]
    monkeypatch.setattr("clusterenv.system.memory.own_groups", lambda controller: groups)
    for used, expected in ((12 * GB, 4 * GB), (17 * GB, 0)):
        monkeypatch.setattr("clusterenv.system.memory.read_text", files("/g", 16 * GB, used).get)
        assert available_bytes() == expected
    groups.clear()
    assert available_bytes() == 32 * GB
