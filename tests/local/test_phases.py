"""Every call in every phase: allowed, or refused with advice that works."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import clusterenv as ce
from clusterenv.vector.phases import Phase
from toys import Trouble

N = 4
ZEROS = np.zeros(N, dtype=np.int64)


def interrupt(*args):
    raise KeyboardInterrupt


class Session:
    """Environments in a given phase, and every call that a user could make then."""

    def __init__(self, phase, monkeypatch):
        self.envs = ce.ClusterEnv([lambda i=i: Trouble(i) for i in range(N)], backend=ce.Local(workers=0))
        self.collector = self.envs.collector(ce.RandomPolicy(), seed=1)
        self.stream = None
        if phase is not Phase.NEW:
            self.envs.reset(seed=0)
            self.envs.step(ZEROS)
        if phase is Phase.PARTIAL:
            self.envs.send([0, 0], [1, 2])
        if phase in ASYNC:
            self.call(ASYNC[phase])
        if phase is Phase.COLLECTING:
            with pytest.raises(ce.DeadlineError):
                self.collector.rollout(5, timeout_s=0.0)
        if phase is Phase.STREAMING:
            self.stream = self.collector.stream(5)
            next(self.stream)
        if phase is Phase.INTERRUPTED:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
                patch.setattr(self.envs._driver.rows, "all_rows", interrupt)
                self.envs.step(ZEROS)
        assert self.envs._guard.phase is phase

    def call(self, name):
        envs, collector = self.envs, self.collector
        state = envs.state_dict() if name == "load_state_dict" else None
        calls = {
            "reset": lambda: envs.reset(seed=0),
            "step": lambda: envs.step(ZEROS),
            "send": lambda: envs.send([0], [3]),
            "recv": lambda: envs.recv(),
            "reset_async": lambda: envs.reset_async(seed=0),
            "reset_wait": lambda: envs.reset_wait(),
            "step_async": lambda: envs.step_async(ZEROS),
            "step_wait": lambda: envs.step_wait(),
            "call_async": lambda: envs.call_async("_obs"),
            "call_wait": lambda: envs.call_wait(),
            "call": lambda: envs.call("_obs"),
            "get_attr": lambda: envs.get_attr("slot"),
            "set_attr": lambda: envs.set_attr("mood", 1),
            "rollout": lambda: collector.rollout(5),
            "stream": lambda: next(collector.stream(5)),
            "evaluate": lambda: collector.evaluate(episodes=1, deterministic=False),
            "load_state_dict": lambda: envs.load_state_dict(state),
            "publish": lambda: collector.publish(),
            "stats": lambda: (envs.stats(), collector.stats()),
        }
        calls[name]()

    def close(self):
        if self.stream is not None:
            self.stream.close()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Calling `close` while waiting")
            self.envs.close()


ASYNC = {Phase.RESETTING: "reset_async", Phase.STEPPING: "step_async", Phase.CALLING: "call_async"}
NO_ASYNC = {"reset_wait": "reset_async", "step_wait": "step_async", "call_wait": "call_async"}

CALLS = ["reset", "step", "send", "recv", "call", "get_attr", "set_attr"]
CALLS += ["rollout", "stream", "evaluate", "load_state_dict", "publish", "stats", *NO_ASYNC, *NO_ASYNC.values()]
OF_ALL = ["step", "call", "get_attr", "set_attr", "rollout", "stream", "evaluate", "load_state_dict"]
OF_ALL += NO_ASYNC.values()


def refused_until(wait):
    refused = {**NO_ASYNC, **dict.fromkeys(["send", "recv", *OF_ALL], wait)}
    del refused[wait]
    return refused


REFUSED = {
    Phase.NEW: {**NO_ASYNC, "step": "reset", "send": "reset", "recv": "reset", "step_async": "reset"},
    Phase.IDLE: {**NO_ASYNC, "recv": "send"},
    Phase.PARTIAL: {**NO_ASYNC, **dict.fromkeys(OF_ALL, "recv")},
    Phase.RESETTING: refused_until("reset_wait"),
    Phase.STEPPING: refused_until("step_wait"),
    Phase.CALLING: refused_until("call_wait"),
    Phase.COLLECTING: {
        **NO_ASYNC,
        **dict.fromkeys(["step", "send", "stream", "load_state_dict", *ASYNC.values()], "rollout"),
        "recv": "send",
    },
    Phase.STREAMING: {
        **NO_ASYNC,
        **dict.fromkeys(["reset", "step", "send", "rollout", "stream", "evaluate", "load_state_dict"], "close"),
        **dict.fromkeys(ASYNC.values(), "close"),
        "recv": "send",
    },
    Phase.INTERRUPTED: {
        **NO_ASYNC,
        **dict.fromkeys(["step", "send", "recv", "rollout", "stream", "evaluate"], "reset"),
        **dict.fromkeys(["step_async", "step_wait", "reset_wait"], "reset"),
    },
}
"""Phase → call → what the text advises to call first."""


@pytest.mark.parametrize("phase", list(Phase), ids=lambda phase: phase.name)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_allowed_or_refused_with_advice_that_works(monkeypatch, phase, name):
    session = Session(phase, monkeypatch)
    advice = REFUSED[phase].get(name)
    if advice is None:
        session.call(name)
    else:
        begins = rf"({name}\(\) (before|while|after)|Calling `{name}` (while|without))"
        with pytest.raises(ce.UsageError, match=rf"^{begins} .*{advice}\(") as caught:
            session.call(name)
        assert "{" not in str(caught.value)
        follow(session, advice)
        if name in BEGINS:
            follow(session, BEGINS[name])
        session.call(name)
    session.close()


BEGINS = {"recv": "send", **NO_ASYNC}
"""What waits → what has to be called before it."""

AFTER = {"send": Phase.PARTIAL, **{call: phase for phase, call in ASYNC.items()}}
"""What need not be called in a phase, because it was."""


def follow(session, advice):
    """Do what a text advises; where that is refused, do what that text advises first."""
    if advice == "close":
        session.stream.close()
    elif session.envs._guard.phase is not AFTER.get(advice):
        first = REFUSED[session.envs._guard.phase].get(advice)
        if first is not None:
            follow(session, first)
        session.call(advice)


def test_a_fragment_that_a_reset_drops_is_counted():
    with ce.ClusterEnv([lambda: Trouble(0)] * 2, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        collector.rollout(3)
        assert collector.stats()["dropped_fragments"] == 0
        with pytest.raises(ce.DeadlineError):
            collector.rollout(3, timeout_s=0.0)
        envs.reset(seed=1)
        assert collector.stats()["dropped_fragments"] == 1
        collector.rollout(3)


class Interrupted(Trouble):
    def step(self, action):
        if self.life == 0 and self.slot == 1 and self.t == 3:
            raise KeyboardInterrupt
        return super().step(action)


@pytest.mark.parametrize("call", ["step", "recv", "step_wait", "rollout", "stream"])
def test_ctrl_c_within_an_environment_of_this_process(tmp_path, call):
    """`Local(workers=0)`: whoever was interrupted in the middle of a step is made anew by the next reset()."""
    memory = str(tmp_path / "lives")
    thunks = [lambda i=i: Interrupted(i, memory=memory, length=100) for i in range(N)]
    with ce.ClusterEnv(thunks, backend=ce.Local(workers=0)) as envs:
        collector = envs.collector(ce.RandomPolicy(), seed=1)
        envs.reset(seed=0)
        with pytest.raises(KeyboardInterrupt):
            if call == "step":
                for _ in range(4):
                    envs.step(ZEROS)
            elif call == "recv":
                for _ in range(4):
                    envs.send(ZEROS)
                    envs.recv()
            elif call == "step_wait":
                for _ in range(4):
                    envs.step_async(ZEROS)
                    envs.step_wait()
            elif call == "rollout":
                collector.rollout(8)
            else:
                next(collector.stream(8))
        obs, _ = envs.reset(seed=0)
        assert obs[:, 3].tolist() == [0.0] * N and obs[1, 1] == 1
        assert envs.step(ZEROS)[0][:, 3].tolist() == [1.0] * N
        assert collector.rollout(8).valid.all()
