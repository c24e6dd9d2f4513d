"""`clusterenv bench` on real environments: what it prints, not how fast they are."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from clusterenv.bench import advise, command, main
from clusterenv.bench.command import run
from clusterenv.bench.data import Point, Report
from clusterenv.bench.measure import Setting, Subject, Subjects, has_native, head_cost, interleave
from clusterenv.bench.policy import forward, policy_for
from clusterenv.bench.report import as_json, as_text, print_report
from clusterenv.bench.target import Target, find_target
from clusterenv.errors import PolicyError, SpecError
from clusterenv.system.cpus import usable_cores
from clusterenv.system.memory import available_bytes


class Sleeper(gym.Env[Any, Any]):
    """Sleeps 1 ms a step, 10 ms in one of ten; its observation is a dict."""

    observation_space = spaces.Dict({"seen": spaces.Box(-1.0, 1.0, (3,)), "mode": spaces.Discrete(2)})
    action_space = spaces.Box(-1.0, 1.0, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._observation(), {}

    def step(self, action: Any) -> Any:
        time.sleep(0.010 if self.np_random.random() < 0.1 else 0.001)
        return self._observation(), 0.0, False, self.np_random.random() < 0.02, {}

    def _observation(self) -> dict[str, Any]:
        return {"seen": np.zeros(3, np.float32), "mode": np.int64(1)}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working folder, as users have one."""
    (tmp_path / "bench_target.py").write_text(
        "import gymnasium as gym\n"
        "NUMBER = 3\n"
        "def make_env():\n    return gym.make('CartPole-v1')\n"
        "def make_nothing():\n    gym.make('CartPole-v1')\n"
        "def make_error():\n    raise RuntimeError('no display')\n"
        "class Failing(gym.Wrapper):\n"
        "    def step(self, action):\n        raise RuntimeError('the simulator exploded')\n"
        "def make_failing():\n    return Failing(gym.make('CartPole-v1'))\n"
        "class Talking(gym.ObservationWrapper):\n"
        "    observation_space = gym.spaces.Dict(says=gym.spaces.Text(5))\n"
        "    def observation(self, obs):\n        return {'says': 'hello'}\n"
        "def make_talking():\n    return Talking(gym.make('CartPole-v1'))\n"
        "gym.register('bench_target/Pole-v0', 'bench_target:make_env')\n"
    )
    (tmp_path / "bench_broken.py").write_text("import not_there\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "bench_target"


def test_a_function_of_the_users_is_measured_and_a_line_of_code_recommended(
    package: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    assert main(f"{package}:make_env", seconds=4, as_json=True) == 0
    assert time.monotonic() - begin < 60
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert printed.err == ""  # progress is for terminals
    assert results["bare"]["cores"] == usable_cores() and results["bare"]["rate"] > 0
    assert 5 < results["bare"]["episode_steps"] < 60 and 0 < results["bare"]["reset_share"] < 1
    assert set(results["bare"]["step_s"]) == {"mean", "p5", "p50", "p95", "p99"}
    assert sum(results["shares"].values()) == pytest.approx(1.0)
    rollout, step = results["choices"]
    assert (rollout["mode"], step["mode"]) == ("rollout", "step")
    points = [rates["point"] for rates in results["candidates"]]
    assert rollout["point"] in points and step["point"] in points
    assert all(1 <= point["workers"] <= usable_cores() for point in points)
    assert min(len(rates["rollout"] or rates["step"]) for rates in results["candidates"]) >= 3
    number = rollout["point"]["workers"] * rollout["point"]["envs"]
    backend = f"ce.Local(workers={rollout['point']['workers']})"
    assert results["code"] == [
        "from bench_target import make_env",
        f"envs = ce.ClusterEnv(make_env, num_envs={number}, backend={backend})",
    ]


@pytest.mark.parametrize("recommended", [Point(1, 2), Point(2, 2)])
def test_send_and_recv_are_measured_if_steps_are_uneven_at_the_recommended_point(
    recommended: Point, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = (Point(1, 2), Point(2, 2))
    choose = advise.choose

    def chosen(mode: Any, measured: Any, all_rate: float) -> Any:
        return replace(choose(mode, measured, all_rate), point=recommended)

    monkeypatch.setattr(advise, "candidates", lambda *args, **options: points)
    monkeypatch.setattr(advise, "choose", chosen)
    monkeypatch.setattr(command, "lockstep_loss", lambda step_s, point: 2.0 if point.workers > 1 else 1.0)
    report = run(_target(Sleeper), 2.0, 2, lambda text: None)
    assert [compared.name for compared in report.compared] == ["send/recv"] * (recommended.workers - 1)


@pytest.fixture(scope="module")
def sleeper_report() -> Report:
    said: list[str] = []
    report = run(_target(Sleeper), 4.0, 4, said.append)
    assert said[:2] == ["starting", "bare loops"]
    return report


def _target(make: Any) -> Target:
    return Target("my_pkg:Sleeper", make, make, is_id=False)


def test_an_environment_that_waits_is_recognised_and_compared_with_partial_batches(sleeper_report: Report) -> None:
    report = sleeper_report
    assert report.bare.cpu_share < 0.7 and 0 <= report.bare.taken_share < 1 and 1e-3 < report.bare.row_s < 0.1
    assert max(rates.point.workers for rates in report.explored) == 4
    assert [compared.name for compared in report.compared] == ["send/recv"]
    assert {"idle", "uneven"} <= {note.kind for note in report.notes}


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_report_has_the_same_content_as_text_on_a_terminal_and_as_json(sleeper_report: Report) -> None:
    plain, terminal = io.StringIO(), _Terminal()
    print_report(sleeper_report, plain)
    print_report(sleeper_report, terminal)
    assert plain.getvalue() == as_text(sleeper_report)
    for text in (plain.getvalue(), terminal.getvalue()):
        assert "from my_pkg import Sleeper" in text and "the limit" in text and "num_envs" in text
        assert sleeper_report.notes[-1].text.split()[0] in text
    assert json.loads(as_json(sleeper_report))["target"] == "my_pkg:Sleeper"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("not_there:make", "the module not_there cannot be imported: ModuleNotFoundError"),
        ("bench_broken:make", "No module named 'not_there'"),
        ("bench_target:NUMBER", "is int, which cannot be called"),
        ("bench_target:make_envs", "did you mean bench_target:make_env?"),
        ("bench_target:make_nothing", "returned None, expected a gymnasium.Env; is its `return` missing?"),
        ("bench_target:make_error", "cannot be made: the environment of slot"),
        ("CartPol-v1", "unknown environment id 'CartPol-v1'"),
        ("bench_target:", "expected an id such as CartPole-v1, or module:function"),
    ],
)
def test_a_wrong_target_is_explained(package: str, target: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(target, seconds=2) == 2
    printed = capsys.readouterr()
    assert says in printed.err and printed.err.startswith("clusterenv bench: ") and printed.out == ""
    if "make_nothing" in target:
        assert "Traceback" not in printed.err


def test_an_environment_that_fails_is_no_wrong_target(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{package}:make_failing", seconds=2) == 1
    assert "the simulator exploded" in capsys.readouterr().err
    assert main("CartPole-v1", seconds=0) == 2 and main("CartPole-v1", workers=0) == 2


def test_an_environment_with_other_observations(package: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(f"{package}:make_talking", seconds=2) == 1
    printed = capsys.readouterr().err
    assert "the observation space is Dict('says': Text(" in printed and "Traceback" not in printed


@pytest.mark.parametrize(
    "space",
    [
        spaces.Text(5),
        spaces.Sequence(spaces.Discrete(3)),
        spaces.Box(-1.0, 1.0, (0,)),
        spaces.Tuple([spaces.Discrete(2), spaces.Box(-1.0, 1.0, (3, 0))]),
        spaces.Dict({}),
    ],
    ids=lambda space: type(space).__name__,
)
def test_observations_that_rollouts_cannot_hold(space: spaces.Space[Any]) -> None:
    with pytest.raises(PolicyError, match="rollouts need observations of a fixed size above 0"):
        policy_for(space, spaces.Discrete(2))


def test_targets_may_be_ids_that_a_module_registers(package: str) -> None:
    by_id, by_function = find_target(f"{package}:bench_target/Pole-v0"), find_target(f"{package}:make_env")
    assert by_id.is_id and by_id.code("num_envs=2") == (
        'envs = ce.ClusterEnv("bench_target:bench_target/Pole-v0", num_envs=2)',
    )
    assert not by_function.is_id and not has_native(by_function) and has_native(find_target("CartPole-v1"))
    with pytest.raises(SpecError, match="has no 'missing'"):
        find_target(f"{package}:missing")


def test_rows_over_the_network_cost_the_head_time_and_bytes() -> None:
    cost = head_cost(Setting(find_target("CartPole-v1"), 16, 0.05), envs=2, seconds=0.2)
    assert 0 < cost.row_s < 0.1 and 4 * 4 + 8 + 4 <= cost.row_bytes <= 64


def test_subjects_are_measured_in_turns_and_all_of_them_closed() -> None:
    setting = Setting(find_target("CartPole-v1"), 8, 0.02)
    small, large = Point(1, 1), Point(1, 4)
    with Subjects(setting) as subjects:
        rates = subjects.measure({"rollout": (small, large), "step": (large,)}, until=0.0, least=2)
        assert [(r.point, len(r.rollout), len(r.step)) for r in rates] == [(small, 2, 0), (large, 2, 2)]
        kept, dropped = subjects[large], subjects[small]
        subjects.keep([large])
        assert dropped.envs.closed and not kept.envs.closed
        assert kept.send_recv(0.02) > 0 and kept.step(0.02) > 0 and kept.rollout(0.02) > 0
    assert kept.envs.closed


def test_partial_batches_are_acted_for_as_whole_ones_are() -> None:
    """Otherwise the comparison of the two ways would count the policy in one of them only."""
    with Subjects(Setting(find_target("CartPole-v1"), 8, 0.02)) as subjects:
        subject = subjects[Point(2, 2)]
        received: list[int] = []
        sent: list[int] = []
        act, send = subject._act, subject.envs.send

        def acts(obs: Any) -> Any:
            received.append(len(obs))
            return act(obs)

        def sends(actions: Any, slots: Any = None) -> None:
            sent.append(len(actions))
            send(actions, slots)

        subject._act, subject.envs.send = acts, sends  # type: ignore[assignment, method-assign]
        assert subject.send_recv(0.1) > 0
    assert received == sent and received[0] == 4 and len(received) > 2 and min(received) >= 2


def test_a_subject_whose_policy_cannot_act_leaves_nothing_behind() -> None:
    class Odd(Sleeper):
        action_space = spaces.Tuple([spaces.Discrete(2)])  # type: ignore[assignment]

    with pytest.raises(PolicyError, match="rollouts need actions in"):
        Subject(Setting(_target(Odd), 8, 0.02), Point(1, 1))


def test_rounds_alternate_their_order_and_end_in_time() -> None:
    order: list[str] = []

    def take(name: str) -> Any:
        return lambda seconds: order.append(name) or float(len(order))

    rates = interleave({name: take(name) for name in "ab"}, 0.0, until=0.0, least=2)
    assert "".join(order) == "ab" + "ab" + "ba"  # a warm-up, then two rounds
    assert rates == {"a": (3.0, 6.0), "b": (4.0, 5.0)}


@pytest.mark.parametrize(
    "action_space",
    [spaces.Discrete(3), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4), spaces.Box(-1.0, 1.0, (2,))],
)
def test_there_is_a_policy_for_every_usual_action_space(action_space: spaces.Space[Any]) -> None:
    seen = spaces.Tuple([spaces.Box(0, 255, (4, 4), np.uint8), spaces.Discrete(5)])
    policy = policy_for(seen, action_space)
    obs = (np.full((6, 4, 4), 255, np.uint8), np.arange(6))
    params = forward(policy.weights(), obs)
    assert params.shape == (6, policy.prepare(seen, action_space).family.num_params) and np.isfinite(params).all()


def test_memory_is_known() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
