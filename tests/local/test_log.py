"""What the library says, where, and when: nothing unless something is wrong, and what environments print."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pty
import re
import subprocess
import sys
import textwrap

import pytest

import clusterenv as ce
from clusterenv.events import Event, EventLog, emit, emit_output, emit_progress, instruct


def run(script: str, redirect: str = "") -> subprocess.CompletedProcess[str]:
    command = f'exec "$0" -c "$1" {redirect}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, textwrap.dedent(script)], capture_output=True, text=True, timeout=60
    )


QUIET = """
    import logging
    import clusterenv as ce, gymnasium as gym
    backend = ce.Loopback(nodes=1)  # nodes that join are told at INFO
    with ce.ClusterEnv("CartPole-v1", 2, backend=backend) as envs:
        batch = envs.collector(ce.RandomPolicy(), seed=1).rollout(8)
    print(batch.num_steps)
"""


def test_nothing_is_said_where_all_is_well():
    done = run(QUIET)
    assert (done.returncode, done.stdout, done.stderr) == (0, "8\n", "")


def test_a_log_that_takes_info_has_it_all():
    done = run(QUIET.replace("import logging", "import logging; logging.basicConfig(level=logging.INFO)"))
    assert "INFO:clusterenv:policy recognised: random actions" in done.stderr
    assert "INFO:clusterenv:node_joined" in done.stderr


FAILING = """
    import sys
    import clusterenv as ce, gymnasium as gym

    class Fails(gym.Wrapper):
        steps = 0
        def step(self, action):
            print("about to step")
            self.steps += 1
            if self.steps == 2:
                raise RuntimeError("the simulator exploded")
            return super().step(action)

    envs = ce.ClusterEnv([lambda: Fails(gym.make("CartPole-v1"))], backend=ce.Local(workers=1))
    envs.reset(seed=0)
    {before}
    for _ in range(20):
        infos = envs.step([0])[4]
        if "transition_valid" in infos:
            break
    print(infos["loss_reason"])
    envs.close()
"""


def test_warnings_and_what_environments_print_are_seen_without_any_logging_set_up():
    done = run(FAILING.format(before=""))
    assert done.stdout == "['RuntimeError: the simulator exploded']\n"
    assert "clusterenv: env_error: RuntimeError: the simulator exploded (slot 0, phase step" in done.stderr
    assert "[slot 0] about to step\n" in done.stderr


@pytest.mark.guarantee(26)
@pytest.mark.parametrize(
    ("redirect", "before"), [("2>/dev/full", ""), ("2>&-", ""), ("", "sys.stderr.close()"), ("", "sys.stderr = None")]
)
def test_a_full_or_closed_stderr_ends_no_run(redirect, before):
    done = run(FAILING.format(before=before), redirect)
    assert done.stdout == "['RuntimeError: the simulator exploded']\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def silent_log(caplog):
    """Nobody shows INFO, as in a script that did not configure logging, or with its default level."""
    assert not logging.getLogger("clusterenv").isEnabledFor(logging.INFO)
    return caplog


def test_progress_is_for_terminals(silent_log, monkeypatch):
    file, terminal = io.StringIO(), Terminal()
    for stream in (file, terminal):
        monkeypatch.setattr(sys, "stderr", stream)
        emit_progress("1/2 nodes")
    assert (file.getvalue(), terminal.getvalue()) == ("", "clusterenv: 1/2 nodes\n") and not silent_log.records
    with silent_log.at_level(logging.INFO):
        emit_progress("2/2 nodes")
    assert silent_log.messages == ["2/2 nodes"] and "2/2" not in terminal.getvalue(), "said once"


def test_the_wait_for_nodes_is_told_on_a_terminal_after_seconds(silent_log, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    for timeout_s, waiting in ((0.5, 0), (2.5, 1)):
        with pytest.raises(ce.StartError, match="0/1 nodes"):
            ce.ClusterEnv("CartPole-v1", 1, backend=ce.Manual(1, bind="127.0.0.1", start_timeout_s=timeout_s))
        assert terminal.getvalue().count("clusterenv: 0/1 nodes, 0/1 environments, waiting for node 0") == waiting
    assert terminal.getvalue().count("node 0: clusterenv node --join node-0.key") == 2, "what a person has to do"


SLOW = """
    import time
    import clusterenv as ce, gymnasium as gym
    from clusterenv import long_waits
    long_waits._QUIET_S = 0.4

    class Slow(gym.Wrapper):
        def step(self, action):
            time.sleep(0.25)
            return super().step(action)

    makers = [lambda: gym.make("CartPole-v1"), lambda: Slow(gym.make("CartPole-v1"))]
    with ce.ClusterEnv(makers, backend=ce.Loopback(nodes=2)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(8)
        collector.rollout(8)
        collector.evaluate(episodes=4, deterministic=False)
"""


def test_a_long_rollout_and_evaluation_show_their_progress_on_a_terminal_only():
    done = run(SLOW)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    terminal, other = pty.openpty()
    try:
        command = [sys.executable, "-c", textwrap.dedent(SLOW)]
        with subprocess.Popen(command, stderr=other, stdout=other, stdin=subprocess.DEVNULL) as process:
            os.close(other)
            shown = b""
            with contextlib.suppress(OSError):  # EIO: the script has ended
                while piece := os.read(terminal, 4096):
                    shown += piece
        assert process.returncode == 0
    finally:
        os.close(terminal)
    lines = shown.decode().splitlines()
    rollouts = [line for line in lines if line.startswith("clusterenv: rollout: ")]
    assert re.fullmatch(r"clusterenv: rollout: 1 of 2 fragments after \d s, waiting for worker 1", rollouts[0]), lines
    assert 1 <= len(rollouts) <= 3, "only of the first: the second takes as long"
    assert re.search(r"clusterenv: evaluation: [02] of 4 episodes after \d s", "\n".join(lines)), lines
    assert len(lines) == len(rollouts) + sum("evaluation" in line for line in lines), lines


def test_what_environments_print_can_be_logged_or_silenced(silent_log, capsys):
    emit_output("[slot 1] hello")
    assert capsys.readouterr().err == "[slot 1] hello\n" and not silent_log.records
    with silent_log.at_level(logging.INFO, "clusterenv.output"):
        emit_output("[slot 1] hello")
    assert capsys.readouterr().err == "" and silent_log.messages == ["[slot 1] hello"]
    for name in ("clusterenv.output", "clusterenv"):
        with silent_log.at_level(logging.ERROR, name):
            emit_output("[slot 1] hello")
    assert capsys.readouterr().err == "" and len(silent_log.records) == 1


@pytest.mark.guarantee(26)
def test_a_log_that_cannot_be_written_is_no_reason_to_stop(monkeypatch):
    closed = io.StringIO()
    closed.close()
    broken = logging.StreamHandler(closed)
    logging.getLogger("clusterenv").addHandler(broken)
    monkeypatch.setattr(sys, "stderr", closed)
    try:
        emit(logging.WARNING, "a")
        emit_output("b")
        emit_progress("c")
        instruct("d")
    finally:
        logging.getLogger("clusterenv").removeHandler(broken)


class NotAFile:
    """A stderr that a GUI or a notebook has put in place, and that has gone with its window."""

    def write(self, text):
        raise RuntimeError("the window is closed")


@pytest.mark.guarantee(26)
def test_whatever_a_stderr_raises_is_no_reason_to_stop(monkeypatch):
    monkeypatch.setattr(sys, "stderr", NotAFile())
    monkeypatch.setattr(logging.getLogger("clusterenv"), "propagate", False)  # to what pytest has put there
    EventLog().add(Event("slow", "slot 1 is slow"))
    emit(logging.WARNING, "a")
    emit_output("b")
    emit_progress("c")
    instruct("d")


WITHOUT_STDERR = """
import os, sys
import gymnasium as gym
import numpy as np
import clusterenv as ce

class Bad(gym.Wrapper):
    t = 0

    def step(self, action):
        print("a line")
        self.t += 1
        if self.t % 3 == 0:
            raise ValueError("bad")
        return super().step(action)

backend = ce.Loopback(nodes=1)
recovery = ce.Recovery(max_restarts=100, backoff_s=(0.01, 0.01))
with ce.ClusterEnv([lambda: Bad(gym.make("CartPole-v1"))] * 2, backend=backend, recovery=recovery) as envs:
    if sys.argv[1] == "closed":
        sys.stderr.close()
    else:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 2)
    envs.reset(seed=1)
    for _ in range(12):
        envs.step(np.zeros(2, np.int64))
    print([event.kind for event in envs.events()].count("env_error"))
"""


@pytest.mark.guarantee(26)
@pytest.mark.parametrize("stderr", ["closed", "full"])
def test_faults_are_survived_without_a_stderr(stderr):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_STDERR, stderr], stdout=subprocess.PIPE, text=True, timeout=100
    )
    assert int(done.stdout) >= 4
