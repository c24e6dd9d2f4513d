"""A script that is killed and started again with the same `resume=` goes on with seeds that were not used."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.errors import JournalError
from clusterenv.journal import BLOCK
from clusterenv.testing import Virtual
from seed_ledger import environment, make, read, repeated

pytestmark = pytest.mark.guarantee(13)

_FRAGILE = ce.Recovery(max_restarts=10**6, backoff_s=(0.0, 0.0))

_SCRIPT = """
import functools, sys
import numpy as np
import clusterenv as ce
from seed_ledger import make

journal, ledger, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
recovery = ce.Recovery(max_restarts=10**6, backoff_s=(0.0, 0.0))
make_env = functools.partial(make, ledger, fails_at=10)
envs = ce.ClusterEnv(make_env, 4, backend=ce.Local(workers=workers), recovery=recovery, resume=journal)
envs.reset(seed=1)
print("begun", flush=True)
while True:
    envs.step(np.zeros(4, dtype=np.int64))
"""


def _envs(folder: Path, **options):
    options.setdefault("backend", ce.Local(workers=2))
    return ce.ClusterEnv(functools.partial(make, str(folder / "ledger")), 4, resume=folder / "journal", **options)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_head_that_is_killed_and_restarted_uses_no_seed_twice(tmp_path, workers):
    journal, ledger, dice = tmp_path / "journal", tmp_path / "ledger", random.Random(workers)
    for head in range(4):
        before = len(read(ledger))
        command = [sys.executable, "-c", _SCRIPT, str(journal), str(ledger), str(workers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as script:
            assert script.stdout.readline() == "begun\n"
            wanted = (
                before + 4 + (5 * BLOCK if head == 1 else dice.randrange(60))
            )  # one goes past what it reserved first
            deadline = time.monotonic() + 60
            while len(read(ledger)) < wanted:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            script.kill()
    seeds = read(ledger)
    assert sorted(seeds[:4]) == [1, 2, 3, 4], "the first head uses the seeds that it is given"
    assert repeated(seeds) == []
    assert journal.exists()


def test_a_run_that_ends_in_order_leaves_nothing_to_resume(tmp_path):
    for _ in range(2):
        with _envs(tmp_path) as envs:
            envs.reset(seed=5)
            assert (tmp_path / "journal").stat().st_mode & 0o777 == 0o600
            assert "resumed" not in envs.stats()["events"]
    assert [path.name for path in tmp_path.iterdir()] == ["ledger"]
    assert sorted(read(tmp_path / "ledger")) == [5, 5, 6, 6, 7, 7, 8, 8]


def test_a_run_that_ends_by_an_exception_can_be_resumed(tmp_path):
    with pytest.raises(ZeroDivisionError), _envs(tmp_path) as envs:
        envs.reset(seed=5)
        raise ZeroDivisionError
    with _envs(tmp_path) as envs:
        assert "head 2 of this run" in next(event.reason for event in envs.events() if event.kind == "resumed")
        assert envs.call("get_wrapper_attr", "spec") == (None,) * 4, "before the first reset, as in any run"
        envs.reset(seed=5)
        assert set(envs.stats()["incarnations"]) == {BLOCK}
        envs.step(np.zeros(4, dtype=np.int64))
        envs.reset(seed=9)  # said for this moment, not for the beginning of the run
    seeds = read(tmp_path / "ledger")
    assert sorted(seeds[:4]) == [5, 6, 7, 8] and sorted(seeds[8:]) == [9, 10, 11, 12] and repeated(seeds) == []
    assert not (tmp_path / "journal").exists()


def test_what_follows_depends_on_the_seed_and_on_how_often_it_was_resumed(tmp_path):
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for _ in range(2):
            with pytest.raises(KeyError), _envs(tmp_path / name) as envs:
                obs, _ = envs.reset(seed=3)
                raise KeyError
        found.append(obs)
    np.testing.assert_array_equal(*found)


def test_an_older_checkpoint_leads_to_no_seed_that_was_used(tmp_path):
    with pytest.raises(KeyError), _envs(tmp_path) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=5)
        collector.rollout(4)
        saved = envs.state_dict()
        raise KeyError
    with pytest.raises(KeyError), _envs(tmp_path) as envs:  # fails before it has saved anything
        envs.load_state_dict(saved)
        envs.collector(ce.RandomPolicy(), seed=5).rollout(4)
        raise KeyError
    with _envs(tmp_path) as envs:
        envs.load_state_dict(saved)
        collector = envs.collector(ce.RandomPolicy(), seed=5)
        collector.rollout(4)
        assert collector.stats()["steps"] == 32, "counters go on"
    seeds = read(tmp_path / "ledger")
    assert len(seeds) == 12 and repeated(seeds) == []


def test_actions_are_not_drawn_again_either(tmp_path):
    actions = []
    for _ in range(2):
        with pytest.raises(KeyError), _envs(tmp_path) as envs:
            actions.append(envs.collector(ce.RandomPolicy(), seed=5).rollout(64).actions)
            raise KeyError
    assert (actions[0] != actions[1]).any()


def test_two_environments_cannot_have_one_journal(tmp_path):
    with _envs(tmp_path) as envs:
        with pytest.raises(JournalError, match="in use by another ClusterEnv of this process"):
            _envs(tmp_path)
        envs.reset(seed=1)


def test_a_first_start_that_fails_leaves_no_journal(tmp_path):
    with pytest.raises(ce.EnvError):
        ce.ClusterEnv(functools.partial(_broken, 1), 2, backend=ce.Local(workers=1), resume=tmp_path / "journal")
    assert list(tmp_path.iterdir()) == []


def _broken(number: int):
    raise OSError("no licence")


def test_a_backend_of_others_without_a_journal_is_named(tmp_path):
    class Old(Virtual):
        def start(self, blueprint, mode, recovery, events):
            return super().start(blueprint, mode, recovery, events)

    with pytest.raises(ce.SpecError, match=r"Old\.start\(\) takes no `journal`"):
        _envs(tmp_path, backend=Old(1))
    with _envs(tmp_path, backend=Virtual(2), recovery=_FRAGILE) as envs:
        envs.reset(seed=1)


def test_make_vec_takes_it_too(tmp_path):
    with ce.make_vec("CartPole-v1", 2, backend=ce.Local(workers=0), resume=tmp_path / "journal"):
        assert (tmp_path / "journal").exists()
    with pytest.raises(ce.SpecError, match=r"ClusterEnv\(resume=7\): expected a string, a path or None"):
        ce.make_vec("CartPole-v1", 2, resume=7)
