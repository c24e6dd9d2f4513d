"""The limit on open files (`ulimit -n`): raised as far as a run needs, or named where that is not allowed."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from clusterenv.system.open_files import limit_to_set

SCRIPT = """
    import resource, sys
    import psutil
    import clusterenv as ce
    hard, workers, network, limit_node = map(int, sys.argv[1:])
    if limit_node:
        from clusterenv.backends import loopback
        start = loopback.AgentProcesses.start
        def start_limited(self, node):
            start(self, node)
            resource.prlimit(self._agents[node].pid, resource.RLIMIT_NOFILE, (64, hard))
        loopback.AgentProcesses.start = start_limited
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        backend = ce.Loopback(nodes=1, workers_per_node=workers) if network else ce.Local(workers=workers)
        with ce.ClusterEnv("CartPole-v1", num_envs=workers, backend=backend) as envs:
            envs.reset(seed=0)
            print("steps", envs.step([0] * workers)[1].sum())
    except ce.StartError as error:
        print(error)
    print(len(psutil.Process().children()), "children", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def run(hard: int, workers: int, network: bool = False, limit_node: bool = False) -> tuple[str, str]:
    """What came of it, and the children and the soft limit at the end; the soft limit is 64 at the beginning."""
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(SCRIPT),
        *(str(int(x)) for x in (hard, workers, network, limit_node)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    result, end = done.stdout.splitlines()
    return result, end


@pytest.mark.parametrize("network", [False, True])
def test_the_soft_limit_is_raised_to_what_the_workers_need(network):
    result, end = run(hard=84, workers=30, network=network, limit_node=network)
    assert result == "steps 30.0"
    assert end.startswith("0 children") and (network or end.endswith(" 84"))


def test_a_hard_limit_that_is_too_low_is_named_before_anything_starts():
    result, end = run(hard=70, workers=30)
    assert result.startswith("30 worker processes need 84 open files") and "`ulimit -n`" in result and "70" in result
    assert end == "0 children 64"


def test_a_hard_limit_of_a_node_that_is_too_low_is_named():
    result, _ = run(hard=70, workers=30, network=True, limit_node=True)
    assert result.startswith("node 0 cannot start its workers: 30 worker processes need 84 open files")


@pytest.mark.parametrize(
    ("soft", "hard", "needed", "expected"),
    [
        (1024, 4096, 500, None),  # enough
        (1024, 4096, 1000, 1064),  # enough, with nothing to spare for the script's own files
        (1024, 4096, 2000, 2064),
        (1024, 2000, 2000, 2000),
        (1024, -1, 2000, 2064),  # RLIM_INFINITY
        (-1, -1, 2000, None),
        (1024, 1999, 2000, 1999),
    ],
)
def test_no_more_is_set_than_is_needed_and_allowed(soft, hard, needed, expected):
    assert limit_to_set(soft, hard, needed) == expected
