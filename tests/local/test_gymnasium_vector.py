"""What Gymnasium's own tests ask of vector environments, asked of `ClusterEnv`; `SyncVectorEnv` is the reference."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import error, spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_differing_spaces

import clusterenv as ce
from clusterenv import errors
from toys import SpaceEnv, same
from vector_toys import Anything, Counter, Echo, Gated, History

WORKERS = pytest.mark.parametrize("workers", [0, 2])
CARTPOLES = [lambda: gym.make("CartPole-v1")] * 4


def cluster(thunks, workers=2, **kwargs):
    return ce.ClusterEnv(thunks, backend=ce.Local(workers=workers), **kwargs)


# -- custom spaces ----------------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_custom_spaces_are_batched_as_tuples(workers, mode):
    thunks = [Echo] * 4
    ref, envs = SyncVectorEnv(thunks, autoreset_mode=mode), cluster(thunks, workers, autoreset_mode=mode)
    for made in (ref, envs):
        assert isinstance(made.single_action_space, Anything) and isinstance(made.single_observation_space, Anything)
        assert isinstance(made.action_space, spaces.Tuple) and isinstance(made.observation_space, spaces.Tuple)
    assert envs.observation_space == ref.observation_space and envs.action_space == ref.action_space
    same(envs.reset(seed=1), ref.reset(seed=1))
    for actions in [("a", "b", "c", "d"), ("e", "end", "g", "h"), ("i", "j", "end", "l")]:
        if mode is AutoresetMode.DISABLED:
            actions = tuple(action.replace("end", "stay") for action in actions)
        ours, theirs = envs.step(actions), ref.step(actions)
        assert isinstance(ours[0], tuple)
        same(ours, theirs)
    envs.close()


@WORKERS
def test_a_custom_space_within_other_spaces(workers):
    observation_space = spaces.Dict(word=Anything(), image=spaces.Box(0, 255, (2, 2), np.uint8))
    action_space = spaces.Tuple((Anything(), spaces.Discrete(3)))
    thunks = [lambda: SpaceEnv(observation_space, action_space, 3)] * 3
    ref, envs = SyncVectorEnv(thunks), cluster(thunks, workers)
    same(envs.reset(seed=5), ref.reset(seed=5))
    for _ in range(5):
        actions = ref.action_space.sample()
        same(envs.step(actions), ref.step(actions))
    with pytest.raises(ce.ActionError, match=r"slot 1 .*Discrete\(3\).*7"):
        envs.step((("a", "b", "c"), np.array([0, 7, 2])))
    envs.close()


@WORKERS
def test_a_custom_space_in_partial_batches_and_masked_resets(workers):
    envs = cluster([Echo] * 4, workers, autoreset_mode="Disabled")
    envs.reset(seed=0)
    envs.send(("x", "y"), [3, 1])
    obs, *_, infos = envs.recv()
    assert obs == ("step(y)", "step(x)") and infos["slot"].tolist() == [1, 3]
    obs, _ = envs.reset(options={"reset_mask": np.array([True, False, False, True])})
    assert obs == ("reset", "step(y)", "reset", "reset")
    envs.close()


@WORKERS
def test_an_observation_that_its_environment_goes_on_to_change_is_a_copy(workers):
    envs = cluster([History] * 2, workers)
    first, _ = envs.reset(seed=0)
    before = copy.deepcopy(first)
    envs.step(np.zeros(2, np.int64))
    same(first, before)
    envs.close()


@WORKERS
def test_a_lost_environment_with_custom_spaces_is_rebuilt(workers):
    envs = cluster([Echo] * 2, workers)
    envs.reset(seed=0)
    envs.step(("a", "b"))
    obs, *_, infos = envs.step((Echo.FAIL, "c"))
    assert obs == ("step(a)", "step(c)") and infos["transition_valid"].tolist() == [False, True]
    assert envs.step(("d", "e"))[0] == ("reset", "step(e)")
    assert envs.step(("f", "g"))[0] == ("step(f)", "step(g)")
    envs.close()


def test_a_collector_says_which_space_it_cannot_take():
    envs = cluster([Echo] * 2, 0)
    with pytest.raises(ce.PolicyError, match="Anything"):
        envs.collector(ce.RandomPolicy())
    envs.close()


def test_custom_spaces_that_are_not_equal_are_named_with_what_they_lack():
    class Nameless(Anything):
        __eq__ = object.__eq__
        __hash__ = object.__hash__

    with pytest.raises(ce.SpecError, match=r"Nameless.*__eq__"):
        cluster([lambda: SpaceEnv(Nameless(), spaces.Discrete(2))] * 2)


# -- observation modes ------------------------------------------------------------------------------------------

GROWING = [spaces.Box(0, high, (5,)) for high in (1, 2, 3)]
PAIR = (batch_differing_spaces(GROWING), GROWING[0])


def with_observations(observation_spaces):
    return [lambda space=space: SpaceEnv(space, spaces.Discrete(2), 3) for space in observation_spaces]


@WORKERS
@pytest.mark.parametrize("mode", ["different", PAIR], ids=["different", "pair"])
@pytest.mark.parametrize(
    "some",
    [
        GROWING,
        [spaces.Discrete(3), spaces.Discrete(9), spaces.Discrete(2, start=5)],
        [spaces.MultiDiscrete([2, 3]), spaces.MultiDiscrete([5, 1]), spaces.MultiDiscrete([9, 9])],
        [spaces.Dict(a=spaces.Discrete(n), b=spaces.Tuple((spaces.Box(0, n, ()), spaces.Text(4)))) for n in (2, 5, 3)],
    ],
    ids=["Box", "Discrete", "MultiDiscrete", "Dict"],
)
def test_slots_may_have_spaces_that_differ_in_their_bounds(workers, mode, some):
    if mode is PAIR:
        mode = (batch_differing_spaces(some), some[0])
    ref = SyncVectorEnv(with_observations(some), observation_mode=mode)
    envs = cluster(with_observations(some), workers, observation_mode=mode)
    assert envs.observation_space == ref.observation_space == batch_differing_spaces(some)
    assert envs.single_observation_space == ref.single_observation_space == some[0]
    same(envs.reset(seed=3), ref.reset(seed=3))
    for _ in range(6):
        actions = ref.action_space.sample()
        same(envs.step(actions), ref.step(actions))
    envs.close()


@WORKERS
def test_a_pair_may_name_other_spaces_than_the_environments_have(workers):
    single, batched = spaces.Box(-9, 9, (5,)), spaces.Box(-9, 9, (3, 5))
    envs = cluster(with_observations(GROWING), workers, observation_mode=(batched, single))
    assert envs.observation_space is batched and envs.single_observation_space is single
    assert envs.observation_mode == (batched, single)
    obs, _ = envs.reset(seed=1)
    assert obs.shape == (3, 5) and obs in batched
    envs.close()


def test_slots_with_other_spaces_are_rebuilt_and_collected_from(tmp_path):
    some = [spaces.Discrete(3), spaces.Discrete(9)]

    def make(space, folder=tmp_path):
        env = SpaceEnv(space, spaces.Discrete(2), 100)
        step = env.step

        def fail_once(action):
            mark = folder / f"{space.n}"
            if env.t == 3 and not mark.exists():
                mark.touch()
                raise RuntimeError("once")
            return step(action)

        env.step = fail_once
        return env

    thunks = [lambda space=space: make(space) for space in some]
    envs = cluster(thunks, 1, observation_mode="different", recovery=ce.Recovery(on_error="restart"))
    envs.reset(seed=0)
    seen = [envs.step(np.zeros(2, np.int64))[0] for _ in range(40)]
    assert (np.array(seen)[:, 0] < 3).all() and (np.array(seen)[:, 1] >= 3).any()
    assert envs.stats()["incarnations"].tolist() == [1, 1]
    batch = envs.collector(ce.RandomPolicy(), seed=0).rollout(20)
    assert batch.valid.all() and (batch.obs[:, 1] >= 3).any()
    envs.close()


def test_an_observation_mode_that_there_is_not():
    text = "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation space"
    thunks = with_observations(GROWING)
    with pytest.raises(ValueError, match=f"{text}, actual got invalid") as caught:
        cluster(thunks, observation_mode="invalid")
    assert isinstance(caught.value, ce.SpecError)
    with pytest.raises(ValueError, match=f'{text}, actual got diferent.*did you mean "different"'):
        cluster(thunks, observation_mode="diferent")
    with pytest.raises(TypeError, match="both elements of observation_mode to be Spaces") as caught:
        cluster(thunks, observation_mode=(PAIR[0], None))
    assert isinstance(caught.value, ce.SpecError)


@WORKERS
def test_the_same_spaces_are_expected_unless_otherwise_said(workers):
    text = r"observation spaces are not equivalent.*slot 1.*use `observation_mode='different'` instead"
    with pytest.raises(RuntimeError, match=text) as caught:
        cluster(with_observations(GROWING), workers, observation_mode="same")
    assert isinstance(caught.value, ce.SpecError)
    with pytest.raises(RuntimeError, match=text):
        cluster([lambda: gym.make("CartPole-v1"), lambda: gym.make("FrozenLake-v1")], workers)
    with pytest.raises(RuntimeError, match=r"action spaces.*slot 1") as caught:
        cluster([lambda n=n: SpaceEnv(GROWING[0], spaces.Discrete(n)) for n in (2, 3)], workers)
    assert isinstance(caught.value, ce.SpecError)


@pytest.mark.parametrize("workers", [0, 3])
@pytest.mark.parametrize("mode", ["same", "different", (spaces.Box(0, 4, (3, 5)), spaces.Box(0, 4, (5,)))])
@pytest.mark.parametrize(
    "some",
    [
        [spaces.Box(0, 1, (n,)) for n in (1, 2, 3)],
        [spaces.Box(0, 1, (3,)), spaces.Discrete(5), spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(0, 1, (2,)))],
        [spaces.Box(0, 1, (5,), np.float32), spaces.Box(0, 1, (5,), np.float64), spaces.Box(0, 1, (5,), np.float64)],
    ],
    ids=["shapes", "classes", "dtypes"],
)
def test_spaces_of_other_shapes_fit_no_mode(workers, mode, some):
    with pytest.raises(RuntimeError) as caught:
        cluster(with_observations(some), workers, observation_mode=mode)
    assert isinstance(caught.value, ce.SpecError)


def test_observation_modes_of_make_vec_and_of_vector_factories():
    envs = ce.make_vec("CartPole-v1", num_envs=2, observation_mode="different", backend=ce.Local(workers=1))
    ref = SyncVectorEnv(CARTPOLES[:2], observation_mode="different")
    assert envs.observation_space == ref.observation_space and envs.observation_mode == "different"
    envs.close()
    with pytest.raises(ce.SpecError, match="observation_mode"):
        ce.make_vec("CartPole-v1", num_envs=2, observation_modes="different")
    factory = ce.Vector(lambda num_envs, seeds: SyncVectorEnv(CARTPOLES[:num_envs]))
    with pytest.raises(ce.SpecError, match=r"Vector\(fn\).*observation_mode"):
        cluster(factory, num_envs=2, observation_mode="different")


# -- errors that are Gymnasium's too ----------------------------------------------------------------------------

CALLS = {
    "reset": lambda envs: envs.reset(),
    "step": lambda envs: envs.step(np.zeros(4, np.int64)),
    "send": lambda envs: envs.send(np.zeros(4, np.int64)),
    "recv": lambda envs: envs.recv(),
    "reset_async": lambda envs: envs.reset_async(),
    "reset_wait": lambda envs: envs.reset_wait(),
    "step_async": lambda envs: envs.step_async(np.zeros(4, np.int64)),
    "step_wait": lambda envs: envs.step_wait(),
    "call_async": lambda envs: envs.call_async("gravity"),
    "call_wait": lambda envs: envs.call_wait(),
    "call": lambda envs: envs.call("gravity"),
    "get_attr": lambda envs: envs.get_attr("gravity"),
    "set_attr": lambda envs: envs.set_attr("gravity", 1.0),
    "render": lambda envs: envs.render(),
}


@WORKERS
def test_after_close(workers):
    envs = cluster(CARTPOLES, workers)
    envs.close()
    envs.close()
    for call in CALLS.values():
        with pytest.raises(error.ClosedEnvironmentError, match="closed") as caught:
            call(envs)
        assert isinstance(caught.value, ce.ClosedError)


@WORKERS
def test_while_a_step_is_pending(workers):
    envs = cluster(CARTPOLES, workers)
    envs.reset(seed=0)
    envs.send(np.zeros(4, np.int64))
    for call in ("step", "send", "call", "get_attr", "set_attr", "reset_async", "step_async", "call_async"):
        with pytest.raises(error.AlreadyPendingCallError, match="in flight") as caught:
            CALLS[call](envs)
        assert caught.value.name == "step" and isinstance(caught.value, ce.UsageError)
    envs.recv()
    envs.send([0], [1])
    with pytest.raises(error.AlreadyPendingCallError, match="slots \\[1\\] are in flight"):
        envs.send([0, 0], [0, 1])
    envs.reset()  # gives up what is pending
    envs.step(np.zeros(4, np.int64))
    envs.close()


def test_while_a_rollout_or_a_stream_is_pending():
    envs = cluster(CARTPOLES, 0)
    collector = envs.collector(ce.RandomPolicy(), seed=0)
    stream = collector.stream(3)
    next(stream)
    with pytest.raises(error.AlreadyPendingCallError) as caught:
        CALLS["step"](envs)
    assert caught.value.name == "stream"
    stream.close()
    with pytest.raises(ce.DeadlineError):
        collector.rollout(5, timeout_s=0.0)
    with pytest.raises(error.AlreadyPendingCallError) as caught:
        CALLS["step"](envs)
    assert caught.value.name == "rollout"
    with pytest.raises(error.NoAsyncCallError):
        envs.recv()
    envs.close()


@WORKERS
def test_with_nothing_pending(workers):
    envs = cluster(CARTPOLES, workers)
    for _ in range(2):
        with pytest.raises(error.NoAsyncCallError, match=r"reset|send") as caught:
            envs.recv()
        assert caught.value.name == "step" and isinstance(caught.value, ce.UsageError)
        envs.reset()
    envs.close()


@pytest.mark.parametrize(
    "made",
    [
        errors.ClosedError("closed"),
        errors.PendingCallError("step() while slots [0] are in flight", "step"),
        errors.NoPendingCallError("nothing is in flight", "step"),
        errors.SpacesError("they differ"),
        errors.ArgumentTypeError("not that"),
        errors.ActionTypeError("not that"),
    ],
    ids=lambda made: type(made).__name__,
)
def test_such_errors_have_one_root_and_travel(made):
    back = pickle.loads(pickle.dumps(made))
    assert isinstance(back, ce.ClusterEnvError) and type(back) is type(made)
    assert str(back) == str(made) and back.__dict__ == made.__dict__


# -- calls in two halves ----------------------------------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_calls_in_two_halves_equal_whole_ones(workers, mode):
    thunks = [lambda i=i: Counter(i) for i in range(3)]
    ref, envs = SyncVectorEnv(thunks, autoreset_mode=mode), cluster(thunks, workers, autoreset_mode=mode)
    for made in (ref, envs):
        made.set_attr("length", [2, 3, 3])
    envs.reset_async(seed=4)
    same(envs.reset_wait(), ref.reset(seed=4))
    for _ in range(7):
        envs.step_async([1, 2, 3])
        ours, theirs = envs.step_wait(timeout=60), ref.step([1, 2, 3])
        same(ours, theirs)
        ended = theirs[2] | theirs[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            with pytest.raises(ce.UsageError, match="reset_mask"):
                envs.step_async([1, 2, 3])
            envs.reset_async(options={"reset_mask": ended})
            same(envs.reset_wait(timeout=60), ref.reset(options={"reset_mask": ended}))
        envs.call_async("add", 10, times=2)
        same(envs.call_wait(timeout=60), ref.call("add", 10, times=2))
    envs.reset_async(seed=[7, None, 9])
    same(envs.reset_wait(), ref.reset(seed=[7, None, 9]))
    envs.close()


OUT_OF_ORDER = [
    ["reset_wait"],
    ["reset", "step_wait"],
    ["call_wait"],
    ["reset_async", "reset_async"],
    ["reset_async", "step_async"],
    ["reset_async", "call_async"],
    ["reset_async", "set_attr"],
    ["reset_async", "step_wait"],
    ["reset", "step_async", "reset_async"],
    ["reset", "step_async", "step_async"],
    ["reset", "step_async", "call_wait"],
    ["reset", "step_async", "set_attr"],
    ["call_async", "reset_async"],
    ["call_async", "call_async"],
    ["call_async", "set_attr"],
    ["call_async", "reset_wait"],
]


@pytest.mark.parametrize("calls", OUT_OF_ORDER, ids="-".join)
def test_out_of_order_as_gymnasium_says_it(calls):
    *before, wrong = calls
    raised = []
    for envs in (AsyncVectorEnv(CARTPOLES), cluster(CARTPOLES, 0)):
        for call in before:
            CALLS[call](envs)
        with pytest.raises((error.AlreadyPendingCallError, error.NoAsyncCallError)) as caught:
            CALLS[wrong](envs)
        raised.append(caught.value)
        if pending := [call for call in before if call.endswith("_async")]:  # nothing is lost by a wrong call
            CALLS[pending[-1].replace("async", "wait")](envs)
        envs.close()
    theirs, ours = raised
    assert isinstance(ours, type(theirs)) and isinstance(ours, ce.UsageError)
    assert ours.name == theirs.name and str(ours).startswith(str(theirs))


HALVES = ["reset", "step", "call"]
PLACES = pytest.mark.parametrize(
    "place", [ce.Local(workers=2), ce.Loopback(nodes=2, workers_per_node=1)], ids=lambda place: type(place).__name__
)


@PLACES
@pytest.mark.parametrize("half", HALVES)
def test_a_call_that_timed_out_can_be_awaited_again(tmp_path, place, half):
    gate = tmp_path / "gate"
    gate.touch()
    envs = ce.ClusterEnv([lambda i=i: Gated(i, str(gate)) for i in range(3)], backend=place)
    ref = SyncVectorEnv([lambda i=i: Gated(i, str(gate)) for i in range(3)])
    same(envs.reset(seed=0), ref.reset(seed=0))
    gate.unlink()
    begin = {"reset": lambda: envs.reset_async(seed=3), "step": lambda: envs.step_async([1, 2, 3])}
    begin.get(half, lambda: envs.call_async("passed"))()
    wait = getattr(envs, f"{half}_wait")
    for _ in range(2):
        with pytest.raises(
            multiprocessing.TimeoutError, match=rf"`{half}_wait` has timed out.*slots \[.*2\]"
        ) as caught:
            wait(timeout=0.05)
        assert isinstance(caught.value, ce.DeadlineError) and f"call {half}_wait() again" in str(caught.value)
        with pytest.raises(error.AlreadyPendingCallError, match=f"`{half}`"):
            envs.step_async([1, 2, 3])
    gate.touch()
    theirs = {"reset": lambda: ref.reset(seed=3), "step": lambda: ref.step([1, 2, 3])}
    same(wait(), theirs.get(half, lambda: ref.call("passed"))())
    same(envs.step([1, 2, 3]), ref.step([1, 2, 3]))
    envs.close()


@WORKERS
@pytest.mark.parametrize("half", HALVES)
def test_a_timeout_of_nothing_asks_whether_the_results_have_come(workers, half):
    envs = cluster(CARTPOLES, workers)
    envs.reset(seed=0)
    for _ in range(3):
        CALLS[f"{half}_async"](envs)
        for _ in range(10_000):
            with contextlib.suppress(multiprocessing.TimeoutError):
                results = getattr(envs, f"{half}_wait")(timeout=0)
                break
        assert len(results[0] if half != "call" else results) == 4
    envs.close()


@PLACES
@pytest.mark.parametrize("half", HALVES)
def test_a_reset_gives_up_a_call_that_timed_out(tmp_path, place, half):
    gate = tmp_path / "gate"
    gate.touch()
    envs = ce.ClusterEnv([lambda i=i: Gated(i, str(gate)) for i in range(3)], backend=place)
    envs.reset(seed=0)
    gate.unlink()
    begin = {"reset": lambda: envs.reset_async(seed=3), "step": lambda: envs.step_async([1, 2, 3])}
    begin.get(half, lambda: envs.call_async("passed"))()
    with pytest.raises(multiprocessing.TimeoutError):
        getattr(envs, f"{half}_wait")(timeout=0.0)
    gate.touch()
    ref = SyncVectorEnv([lambda i=i: Gated(i, str(gate)) for i in range(3)])
    same(envs.reset(seed=5), ref.reset(seed=5))
    with pytest.raises(error.NoAsyncCallError):
        getattr(envs, f"{half}_wait")()
    same(envs.step([1, 2, 3]), ref.step([1, 2, 3]))
    same(envs.call("added"), ref.call("added"))
    envs.close()


@WORKERS
@pytest.mark.parametrize("half", HALVES)
def test_close_warns_of_what_is_pending(workers, half):
    envs = cluster(CARTPOLES, workers)
    envs.reset(seed=0)
    CALLS[f"{half}_async"](envs)
    with pytest.warns(UserWarning, match=f"Calling `close` while waiting for a pending call to `{half}` to complete"):
        envs.close(terminate=True)
    envs.close()


@WORKERS
def test_an_error_ends_what_is_pending(workers):
    envs = cluster([Echo] * 2, workers, recovery=ce.Recovery(on_error="raise"))
    envs.reset(seed=0)
    envs.step_async((Echo.FAIL, "c"))
    with pytest.raises(ce.EnvError):
        envs.step_wait()
    with pytest.raises(error.NoAsyncCallError, match=r"call reset\(\)"):
        envs.step_wait()
    envs.reset_async(seed=0)
    assert envs.reset_wait()[0] == ("reset", "reset")
    envs.call_async("no_such_method")
    with pytest.raises(ce.EnvError, match="no_such_method"):
        envs.call_wait()
    assert envs.step(("a", "b"))[0] == ("step(a)", "step(b)")
    envs.close()


@WORKERS
def test_a_lost_episode_in_two_halves(workers):
    envs = cluster([Echo] * 2, workers)
    envs.reset(seed=0)
    envs.step(("a", "b"))
    envs.step_async((Echo.FAIL, "c"))
    obs, *_, infos = envs.step_wait()
    assert obs == ("step(a)", "step(c)") and infos["transition_valid"].tolist() == [False, True]
    envs.step_async(("d", "e"))
    assert envs.step_wait()[0] == ("reset", "step(e)")
    envs.close()


# -- calls ------------------------------------------------------------------------------------------------------


@WORKERS
def test_call_and_attributes(workers):
    ref, envs = SyncVectorEnv(CARTPOLES), cluster(CARTPOLES, workers)
    for made in (ref, envs):
        made.set_attr("gravity", [9.81, 3.72, 8.87, 1.62])
    same(envs.get_attr("gravity"), ref.get_attr("gravity"))
    same(envs.call("gravity"), ref.call("gravity"))
    for values in ([1.0, 2.0], (1.0,) * 5):
        with pytest.raises(ValueError):
            ref.set_attr("gravity", values)
        with pytest.raises(ValueError):
            envs.set_attr("gravity", values)
    envs.close()


@WORKERS
def test_environments_share_what_a_manager_holds(workers):
    with multiprocessing.Manager() as manager:
        shared = manager.list()

        class Sharing(Counter):
            def step(self, action):
                shared.append((self.slot, int(action)))
                return super().step(action)

        envs = cluster([lambda i=i: Sharing(i) for i in range(4)], workers)
        envs.reset(seed=0)
        for _ in range(3):
            envs.step([1, 2, 3, 4])
        envs.close()
        assert sorted(shared) == sorted([(0, 1), (1, 2), (2, 3), (3, 4)] * 3)


@WORKERS
def test_call_of_some_slots(workers):
    envs = cluster([lambda i=i: Counter(i) for i in range(5)], workers)
    envs.reset(seed=0)
    assert envs.call("add", 10, times=2, slots=[3, 0]) == (23, 20)
    assert envs.call("added", slots=np.array([4, 3])) == (0, 20)
    assert envs.call("added", slots=[]) == ()
    assert envs.call("added") == (20, 0, 0, 20, 0)
    for wrong in ([0, 0], [5], [-1], "ab", [True, False]):
        with pytest.raises(ce.SpecError, match=r"call\(slots="):
            envs.call("added", slots=wrong)
    envs.close()


@WORKERS
def test_a_keyword_of_the_environments_own_called_slots_goes_by_position(workers):
    envs = cluster([lambda i=i: Counter(i) for i in range(3)], workers)
    assert envs.call("hands", 7) == (7, 7, 7)
    assert envs.call("hands", 7, slots=[1]) == (7,)
    envs.close()


def test_a_sticky_call_of_some_slots_is_repeated_on_these():
    envs = cluster([lambda i=i: Counter(i) for i in range(3)], 1, recovery=ce.Recovery(on_error="restart"))
    envs.reset(seed=0)
    envs.step(np.zeros(3, np.int64))
    assert envs.call("add", 4, slots=[2, 0], sticky=True) == (6, 4)
    envs.step(np.full(3, Counter.FAIL))
    for _ in range(3):
        envs.step(np.zeros(3, np.int64))
    assert envs.stats()["incarnations"].tolist() == [1, 1, 1]
    assert envs.call("added") == (4, 0, 4)
    saved = envs.state_dict()
    envs.load_state_dict(saved)
    envs.reset()
    assert envs.call("added") == (4, 0, 4)
    envs.close()


def test_slots_of_a_vector_factory_are_called_together():
    envs = cluster(ce.Vector(lambda num_envs, seeds: SyncVectorEnv(CARTPOLES[:num_envs])), 1, num_envs=2)
    with pytest.raises(ce.UsageError, match=r"call\(slots=\.\.\.\)"):
        envs.call("gravity", slots=[0])
    envs.close()


# -- resets, actions, seeds, infos ------------------------------------------------------------------------------


@WORKERS
def test_partial_resets_of_vector_factories(workers):
    ref = SyncVectorEnv(CARTPOLES)
    envs = cluster(ce.Vector(lambda num_envs, seeds: SyncVectorEnv(CARTPOLES[:num_envs])), workers, num_envs=4)
    same(envs.reset(seed=[0, 1, 2, 3]), ref.reset(seed=[0, 1, 2, 3]))
    for mask in ([False, True, False, True], [True, True, False, False]):
        same(envs.step([0, 1, 0, 1]), ref.step([0, 1, 0, 1]))
        arguments = {"seed": [4, 5, 6, 7], "options": {"reset_mask": np.array(mask)}}
        same(envs.reset(**arguments), ref.reset(**arguments))
        for _ in range(3):
            same(envs.step([1, 0, 1, 0]), ref.step([1, 0, 1, 0]))
    envs.close()


@WORKERS
def test_partial_resets(workers):
    ref = SyncVectorEnv(CARTPOLES, autoreset_mode=AutoresetMode.DISABLED)
    envs = cluster(CARTPOLES, workers, autoreset_mode=AutoresetMode.DISABLED)
    first, _ = envs.reset(seed=[0, 1, 2, 3])
    ref.reset(seed=[0, 1, 2, 3])
    for actions in ([0, 1, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1]):
        last, *_ = envs.step(actions)
        ref.step(actions)
    mask = np.array([True, False, True, False])
    obs, infos = envs.reset(seed=[0, 9, 2, 9], options={"reset_mask": mask})
    same((obs, infos), ref.reset(seed=[0, 9, 2, 9], options={"reset_mask": mask}))
    assert (obs[mask] == first[mask]).all() and (obs[~mask] == last[~mask]).all()
    envs.close()


@pytest.mark.parametrize(
    "mask",
    [
        np.array([True]),
        np.array([True] * 5),
        np.array([[True] * 4]),
        np.array([False] * 4),
        np.array([1, 1, 0, 0]),
        np.array([1.0, 1.0, 0.0, 0.0]),
        [True, True, False, False],
    ],
    ids=["few", "many", "2d", "none", "int", "float", "list"],
)
def test_masks_that_fit_nothing_are_refused_as_gymnasium_does(mask):
    ref, envs = SyncVectorEnv(CARTPOLES), cluster(CARTPOLES, 0)
    envs.reset(seed=0), ref.reset(seed=0)
    with pytest.raises((TypeError, ValueError)) as theirs:
        ref.reset(options={"reset_mask": mask})
    with pytest.raises(theirs.type) as ours:
        envs.reset(options={"reset_mask": mask})
    assert isinstance(ours.value, ce.SpecError) and str(ours.value) == str(theirs.value)
    envs.step([0, 0, 0, 0])
    envs.close()


@WORKERS
def test_the_number_of_actions_is_that_of_environments(workers):
    envs = cluster(CARTPOLES, workers)
    envs.reset(seed=0)
    envs.step([np.int64(1), 0, True, 0])
    for wrong in (np.zeros(3, np.int64), np.zeros(5, np.int64)):
        with pytest.raises(ValueError):
            envs.step(wrong)
    with pytest.raises(TypeError) as caught:
        envs.step(0)
    assert isinstance(caught.value, ce.ActionError)
    envs.close()


@WORKERS
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_autoreset_modes_by_name(workers, mode):
    for given in (mode, mode.value):
        envs = cluster([lambda: Counter(0)] * 2, workers, autoreset_mode=given)
        assert envs.metadata["autoreset_mode"] is mode and envs.autoreset_mode is mode
        assert "autoreset_mode" not in Counter.metadata
        envs.close()


@WORKERS
@pytest.mark.parametrize("mode", list(AutoresetMode), ids=lambda mode: mode.name)
def test_autoreset_row_by_row(workers, mode):
    thunks = [lambda i=i: Counter(i) for i in range(3)]
    ref, envs = SyncVectorEnv(thunks, autoreset_mode=mode), cluster(thunks, workers, autoreset_mode=mode)
    for made in (ref, envs):
        made.set_attr("length", [2, 3, 3])
    same(envs.reset(seed=4), ref.reset(seed=4))
    for _ in range(9):
        ours, theirs = envs.step([1, 2, 3]), ref.step([1, 2, 3])
        same(ours, theirs)
        ended = theirs[2] | theirs[3]
        if mode is AutoresetMode.DISABLED and ended.any():
            same(envs.reset(options={"reset_mask": ended}), ref.reset(options={"reset_mask": ended}))
    envs.close()


@WORKERS
def test_seeds(workers):
    ref, envs = SyncVectorEnv(CARTPOLES), cluster(CARTPOLES, workers)
    for seed in (42, None, [5, None, 7, 8]):
        same(envs.reset(seed=seed), ref.reset(seed=seed)) if seed is not None else (envs.reset(), ref.reset())
        same(envs.np_random_seed, ref.np_random_seed)
    for wrong in ([1, 2], [1] * 5):
        with pytest.raises(ValueError):
            ref.reset(seed=wrong)
        with pytest.raises(ValueError):
            envs.reset(seed=wrong)
    for ours, theirs in zip(envs.np_random, ref.np_random, strict=True):
        assert ours.bit_generator.state == theirs.bit_generator.state
    envs.close()


@WORKERS
@pytest.mark.parametrize("copied", [True, False])
def test_returned_observations_may_be_written_to(workers, copied):
    envs = cluster(CARTPOLES, workers, copy=copied)
    obs, _ = envs.reset(seed=0)
    obs[0] = 0
    again, *_ = envs.step([0, 0, 0, 0])
    assert (again[0] != 0).any()
    envs.close()


@WORKERS
def test_float16_observations(workers):
    space = spaces.Box(-1, 1, (3,), np.float16)
    envs = cluster([lambda: SpaceEnv(space, spaces.Discrete(2))] * 2, workers)
    assert envs.reset(seed=0)[0].dtype == envs.step([0, 1])[0].dtype == np.float16
    envs.close()


@WORKERS
def test_frames(workers):
    thunks = [lambda: gym.make("CartPole-v1", render_mode="rgb_array")] * 2
    ref, envs = SyncVectorEnv(thunks), cluster(thunks, workers)
    assert envs.render_mode == "rgb_array" and cluster(CARTPOLES, 0).render_mode is None
    envs.reset(seed=0), ref.reset(seed=0)
    same(envs.render(), ref.render())
    envs.close()
