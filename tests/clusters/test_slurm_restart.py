"""On a real SLURM: a head that is killed and started again goes on with the jobs of the one before."""

from __future__ import annotations

import signal
import time

import pytest

import real
from killed_heads import run
from seed_ledger import read, repeated

pytestmark = pytest.mark.slurm


def _jobs() -> list[str]:
    return [line.split()[0] for line in real.running["slurm"].queue()]


@pytest.mark.guarantee(13)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_jobs_that_outlive_their_head_join_the_next_one(tmp_path, number):
    with run(tmp_path, "Slurm", extra={"exclusive": None}) as it:
        it.start()
        it.begun()
        before, pids = _jobs(), set(it.pids)
        assert len(before) == 2
        it.kill_head(number)
        it.start()
        it.begun()
        assert _jobs() == before and it.pids == pids, "neither a job nor an agent was started again"
        it.end()
        deadline = time.monotonic() + 30
        while _jobs():
            assert time.monotonic() < deadline, "the jobs of an earlier head end with the run too"
            time.sleep(0.2)
        assert repeated(read(it.ledger)) == [] and not it.journal.exists()
