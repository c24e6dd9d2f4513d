"""A launch that fails half-way: what the backend has opened is closed, and nothing is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

import clusterenv as ce
from clusterenv.backends.launch.note import Note
from clusterenv.backends.remote import Remote


class Queue:
    """`Jobs` that outlive a killed head."""

    def __init__(self):
        self.log = []

    def start(self, node):
        self.log.append("start")

    def look(self):
        return {}

    def stop(self, deadline):
        self.log.append("stop")

    def note(self):
        return {"name": "x"}


@dataclass(frozen=True)
class Unfinished(Remote):
    """It forgets that jobs in a queue have to be collected."""

    queue: Queue = field(default_factory=Queue)

    def launch(self, plan):
        return self.queue


@dataclass(frozen=True)
class Finished(Unfinished):
    name: ClassVar[str] = "finished"

    @staticmethod
    def collect_garbage(note, deadline):
        return "nothing is left"


def test_jobs_that_outlive_a_head_need_somebody_to_collect_them(tmp_path):
    backend = Unfinished(nodes=1, bind="127.0.0.1", folder=tmp_path)
    with pytest.raises(ce.SpecError, match=r"Unfinished: .* needs `name` and collect_garbage\(note, deadline\)"):
        ce.ClusterEnv("CartPole-v1", 1, backend=backend)
    assert backend.queue.log == ["stop"] and not list(tmp_path.iterdir())


def test_nothing_is_started_before_the_note_is_written(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Note, "add_jobs", fail)
    backend = Finished(nodes=1, bind="127.0.0.1", folder=tmp_path)
    with pytest.raises(ce.StartError, match="No space left on device"):
        ce.ClusterEnv("CartPole-v1", 1, backend=backend)
    assert backend.queue.log == ["stop"] and not list(tmp_path.iterdir())


def test_a_backend_without_launch_is_none():
    @dataclass(frozen=True)
    class Nothing(Remote):
        pass

    with pytest.raises(TypeError, match="launch"):
        Nothing(nodes=1)
