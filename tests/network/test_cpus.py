"""How many CPUs this process may use: affinity, and the quotas of the control groups that it is in."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterenv.system.cpus import cpu_quota, mounts_of, whole_cores

V1_MOUNT = "32 31 0:29 {root} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct"
V1_OTHER = "34 31 0:31 / /sys/fs/cgroup/cpuset rw,relatime - cgroup cgroup rw,cpuset"
V2_MOUNT = "41 31 0:38 {root} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
DISK = "24 1 8:1 / / rw,relatime - ext4 /dev/root rw"


def v1(folder: str, quota: int, period: int = 100_000) -> dict[str, str]:
    at = f"/sys/fs/cgroup/cpu,cpuacct{folder}"
    return {f"{at}/cpu.cfs_quota_us": f"{quota}\n", f"{at}/cpu.cfs_period_us": f"{period}\n"}


def v2(folder: str, text: str) -> dict[str, str]:
    return {f"/sys/fs/cgroup{folder}/cpu.max": f"{text}\n"}


@pytest.mark.parametrize(
    ("membership", "mount", "files", "expected"),
    [
        pytest.param("0::/a/b", V2_MOUNT, v2("/a/b", "150000 100000"), 1.5, id="own group"),
        pytest.param("0::/a/b", V2_MOUNT, v2("/a", "20000 100000") | v2("/a/b", "max 100000"), 0.2, id="parent"),
        pytest.param("0::/a/b", V2_MOUNT, v2("/a", "400000 100000") | v2("/a/b", "300000 100000"), 3.0, id="smallest"),
        pytest.param("0::/a", V2_MOUNT, v2("/a", "max 100000") | v2("/b", "100000 100000"), None, id="no quota"),
        pytest.param("0::/", V2_MOUNT, v2("", "50000 50000"), 1.0, id="container with a namespace"),
        pytest.param("0::/../other", V2_MOUNT, v2("", "50000 50000"), 1.0, id="outside of its namespace"),
        pytest.param("0::/a", V2_MOUNT, {}, None, id="no cpu controller"),
        pytest.param("0::/a", V2_MOUNT, v2("/a", "nonsense"), None, id="unknown format"),
        pytest.param("3:cpu,cpuacct:/a/b", V1_MOUNT, v1("/a", 200_000) | v1("/a/b", -1), 2.0, id="v1 parent"),
        pytest.param("3:cpu,cpuacct:/a", V1_MOUNT, v1("/a", 5_000, 10_000), 0.5, id="v1 period"),
        pytest.param("3:cpuset:/a\n2:memory:/a", V1_MOUNT, v1("/a", 100_000), None, id="v1 not in a cpu group"),
        pytest.param(
            "3:cpu,cpuacct:/kubepods/pod7/c",
            V1_MOUNT.format(root="/kubepods/pod7/c"),
            v1("", 400_000) | v1("/kubepods", 100_000),
            4.0,
            id="v1 container without a namespace",
        ),
        pytest.param("1:cpu:/a\n0::/a", f"{V1_MOUNT}\n{V2_MOUNT}", v1("/a", 300_000), 3.0, id="hybrid"),
        pytest.param("", "", {}, None, id="no control groups"),
    ],
)
def test_the_smallest_quota_of_a_group_and_its_parents_counts(membership, mount, files, expected):
    mounts = "\n".join([DISK, V1_OTHER, mount.format(root="/")])
    assert cpu_quota(membership, mounts, files.get) == expected


def test_mount_points_with_spaces_are_read():
    mount = "41 31 0:38 / /my\\040groups rw - cgroup2 none rw"
    assert cpu_quota("0::/", mount, {"/my groups/cpu.max": "100000 100000"}.get) == 1.0


@pytest.mark.parametrize(("limit", "expected"), [(4.0, 4), (1.9, 1), (0.2, 1), (64, 64)])
def test_cores_are_whole_and_at_least_one(limit, expected):
    assert whole_cores(limit) == expected


@contextmanager
def control_group(quota_us: int, period_us: int) -> Iterator[Path]:
    """A group below one with this quota: of the first cpu controller that this machine has."""
    mounts = list(mounts_of(Path("/proc/self/mountinfo").read_text()))
    v1_mounts = [Path(mount.point) for mount in mounts if "cpu" in mount.controllers]
    outer = (v1_mounts or [Path(mount.point) for mount in mounts if mount.is_v2])[0] / f"clusterenv-test-{os.getpid()}"
    if not v1_mounts:
        (outer.parent / "cgroup.subtree_control").write_text("+cpu")
    outer.mkdir()
    inner = outer / "inner"
    try:
        if v1_mounts:
            (outer / "cpu.cfs_period_us").write_text(str(period_us))
            (outer / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (outer / "cpu.max").write_text(f"{quota_us} {period_us}")
        inner.mkdir()
        yield inner
    finally:
        if inner.exists():
            inner.rmdir()
        outer.rmdir()


@pytest.mark.network
def test_a_quota_of_one_cpu_starts_one_worker():
    script = """
        import os, sys
        with open(sys.argv[1], "w") as file:
            file.write(str(os.getpid()))
        import clusterenv as ce
        with ce.ClusterEnv("CartPole-v1", num_envs=8, backend=ce.Local()) as envs:
            envs.reset(seed=0)
            print(len(os.sched_getaffinity(0)), envs.stats()["workers"])
    """
    with control_group(100_000, 100_000) as group:
        command = [sys.executable, "-c", textwrap.dedent(script), str(group / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    affinity, workers = map(int, done.stdout.split())
    assert affinity >= 2 and workers == 1
