"""`FakeSource`: made-up but plausible data of a PPO run on four SLURM nodes, for tests of what shows a run.

Everything is drawn from a seed, and time passes only by `advance()`.
"""

from __future__ import annotations

import math
import random

import msgspec

from clusterenv.monitor.sample import (
    EventRecord,
    FragmentRecord,
    HostSample,
    NodeSample,
    Point,
    RunInfo,
    Sample,
    WorkerSample,
)

NODES = 4
WORKERS_PER_NODE = 12
SLOTS_PER_WORKER = 4
SLOTS = NODES * WORKERS_PER_NODE * SLOTS_PER_WORKER
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
WEIGHTS = 1_310_720
UPDATE_S = 4

_CODECS = ("fp32", "int8", "int4", "int2")
_TRACEBACK = """\
Traceback (most recent call last):
  File "clusterenv/worker/stepping.py", line 88, in step
    result = env.step(action)
  File "gymnasium/envs/box2d/lunar_lander.py", line 606, in step
    self._create_particle(3.5, impulse_pos[0], impulse_pos[1], m_power)
  File "my_project/noise.py", line 41, in perturb
    raise FloatingPointError(f"force is not finite: {force}")
FloatingPointError: force is not finite: [nan, 12.5]
"""


class FakeSource:
    """A run that has `seconds` of history; if `hostile`, one of its environments writes HTML into its errors."""

    def __init__(
        self, seconds: int = 900, *, seed: int = 1, began_at: float = 1_790_000_000.0, hostile: bool = True
    ) -> None:
        self._hostile = hostile
        self._random = random.Random(seed)
        self._info = RunInfo(
            name="lander-aps",
            env="LunarLander-v3",
            num_envs=SLOTS,
            backend="Slurm(nodes=4)",
            host="login2",
            pid=48211,
            command="python examples/ppo_detach.py --env LunarLander-v3 --sync aps",
            began_at=began_at,
            version="0.1.0",
        )
        self._speed = [self._random.lognormvariate(0, 0.12) for _ in range(SLOTS)]
        for slot in (37, 38, 39):
            self._speed[slot] *= 3.4
        self._incarnations = [0] * SLOTS
        self._last_loss: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._points: list[Point] = []
        self._events: list[EventRecord] = []
        self._fragments: list[FragmentRecord] = []
        self._forms: list[dict[str, int]] = [{} for _ in range(NODES)]
        self._lags: list[dict[int, int]] = [{} for _ in range(NODES)]
        self._held = [0] * NODES
        self._over = False
        for _ in range(seconds):
            self.advance()

    def info(self) -> RunInfo:
        return self._info

    def points(self, after_s: float = 0.0) -> list[Point]:
        return [point for point in self._points if point.time_s > after_s]

    def events(self, after: int = -1) -> list[EventRecord]:
        return [event for event in self._events if event.number > after][-1000:]

    def fragments(self, after_s: float = 0.0) -> list[FragmentRecord]:
        return [fragment for fragment in self._fragments if fragment.arrived_at > after_s][-2000:]

    def sample(self) -> Sample | None:
        if not self._points:
            return None
        point = self._points[-1]
        learns = self._elapsed % UPDATE_S == UPDATE_S - 1
        return Sample(
            point=point,
            call="" if learns else "rollout",
            call_s=0.8 if learns else 1.3,
            nodes=[self._node(node) for node in range(NODES)],
            workers=[self._worker(worker) for worker in range(NODES * WORKERS_PER_NODE)],
            step_s=[
                0.0 if self._node_of_slot(slot) == 3 and not self._has_fourth else 0.00042 * speed
                for slot, speed in enumerate(self._speed)
            ],
            incarnations=list(self._incarnations),
            slow=[37, 38, 39],
            last_loss=dict(self._last_loss),
            event_counts=dict(self._counts),
            policy={"family": "categorical", "runtime": "onnx", "reason": "exported and checked against torch"},
            is_over=self._over,
        )

    def finish(self) -> None:
        """End the run: one last sample."""
        self.advance()
        self._over = True

    def add_event(self, kind: str, reason: str, **fields: object) -> None:
        event = EventRecord(number=len(self._events), kind=kind, reason=reason, time_s=self._now, **fields)
        self._events.append(event)
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def advance(self) -> None:
        """Let a second pass."""
        previous = self._points[-1] if self._points else Point(time_s=self._info.began_at)
        self._points.append(msgspec.structs.replace(previous, time_s=previous.time_s + 1))
        second = self._elapsed
        self._lose(second)
        learned = 1 - math.exp(-second / 350)
        noise = self._random.gauss(0, 1)
        learns = second % UPDATE_S == UPDATE_S - 1
        rate = 0 if learns else (52_000 if self._has_fourth else 39_500) * (1 + 0.03 * noise)
        waiting = 0.14 + 0.02 * self._random.random() + (0.55 if learns else 0)
        policy = (1 - waiting) * 0.31
        version = second // UPDATE_S
        drift, pulls, sent = self._synchronize(version, previous)
        steps = int(rate)
        self._points[-1] = msgspec.structs.replace(
            self._points[-1],
            steps=previous.steps + steps,
            steps_per_s=float(steps),
            environment=1 - waiting - policy,
            policy=policy,
            waiting=waiting,
            episodes=previous.episodes + int(rate / (120 + 300 * learned)),
            episode_return=None if second < 8 else -180 + 410 * learned + 9 * noise,
            episode_length=None if second < 8 else 105 + 290 * learned + 12 * self._random.gauss(0, 1),
            version=version,
            held_version=min(self._held),
            drift=drift,
            drift_se=drift * 0.09,
            threshold=0.01,
            pulls=previous.pulls + pulls,
            weight_bytes=previous.weight_bytes + sent,
            pushed_bytes=(version + 1) * WEIGHTS * NODES,
            fragment_bytes=previous.fragment_bytes + steps * 47,
            losses=sum(self._counts.get(kind, 0) for kind in ("env_error", "worker_lost")),
            sent_bytes=previous.sent_bytes + sent + 9_000,
            received_bytes=previous.received_bytes + steps * 47,
            cpu=0.22 + 0.5 * learns,
            memory=812 << 20,
        )
        if not learns:
            self._collect(version)

    @property
    def _now(self) -> float:
        return self._points[-1].time_s

    @property
    def _elapsed(self) -> int:
        return int(self._now - self._info.began_at)

    @property
    def _has_fourth(self) -> bool:
        return 240 <= self._elapsed < 620 or self._elapsed >= 760

    def _node_of_slot(self, slot: int) -> int:
        return slot // (WORKERS_PER_NODE * SLOTS_PER_WORKER)

    def _lose(self, second: int) -> None:
        if second == 240:
            self.add_event("node_joined", "node 3 (cn-118) joined, job 771204")
        if second == 620:
            self.add_event("node_lost", "node 3 (cn-118): the scheduler preempted job 771204; requeued")
        if second == 760:
            self.add_event("node_joined", "node 3 (cn-131) joined, job 771204")
        if second in (155, 590, 700):
            slot = (second * 7) % 144
            reason = "FloatingPointError: force is not finite: [nan, 12.5]"
            detail = _TRACEBACK
            if second == 590 and self._hostile:
                reason, detail = f"ValueError: level {HOSTILE}", f"{_TRACEBACK}\n{HOSTILE}\n"
            self._rebuild((slot,), reason)
            self.add_event(
                "env_error",
                reason,
                slots=(slot,),
                worker=slot // SLOTS_PER_WORKER,
                phase="step",
                seed=918_273 + slot,
                incarnation=self._incarnations[slot],
                step=211,
                detail=detail,
            )
        if second == 433:
            slots = (96, 97, 98, 99)
            self._rebuild(slots, "killed by SIGKILL: out of memory")
            self.add_event(
                "worker_lost", "killed by SIGKILL: probably out of memory", slots=slots, worker=24, phase="step"
            )
            self.add_event("worker_replaced", "worker 24 runs again", slots=slots, worker=24)
        if second == 300:
            self.add_event("slow", "3.4 times slower than the median of 192 slots", slots=(37, 38, 39), worker=9)

    def _rebuild(self, slots: tuple[int, ...], reason: str) -> None:
        for slot in slots:
            self._incarnations[slot] += 1
            self._last_loss[slot] = reason

    def _synchronize(self, version: int, previous: Point) -> tuple[float, int, int]:
        """Return the drift now, and the pulls and bytes of this second."""
        per_update = 0.0012 + 0.004 * math.exp(-self._elapsed / 200)
        behind = version - min(self._held)
        drift = max(1e-4, per_update * behind * (1 + 0.1 * self._random.gauss(0, 1)))
        if drift < 0.01:
            return drift, 0, 0
        sent = 0
        for node in range(NODES):
            codec = "fp32" if not self._held[node] else self._random.choices(_CODECS[1:], (2, 7, 3))[0]
            sent += int(WEIGHTS * {"fp32": 1.0, "int8": 0.24, "int4": 0.1, "int2": 0.04}[codec])
            self._forms[node][codec] = self._forms[node].get(codec, 0) + 1
            self._held[node] = version
        return drift, NODES, sent

    def _collect(self, version: int) -> None:
        added = []
        fourth = WORKERS_PER_NODE * (NODES if self._has_fourth else NODES - 1)
        for worker in range(fourth):
            node = worker // WORKERS_PER_NODE
            speed = max(self._speed[worker * SLOTS_PER_WORKER : (worker + 1) * SLOTS_PER_WORKER])
            environment_s = min(0.68, 0.34 * speed)
            policy_s = 0.17 * self._random.uniform(0.9, 1.1)
            lag = max(0, version - self._held[node])
            self._lags[node][lag] = self._lags[node].get(lag, 0) + 1
            asked_at = self._now - 1 + 0.02
            arrived_at = asked_at + environment_s + policy_s + 0.03 + 0.05 * self._random.random()
            added.append(FragmentRecord(worker, asked_at, arrived_at, environment_s, policy_s, 1024, self._held[node]))
        self._fragments += sorted(added, key=lambda fragment: fragment.arrived_at)
        del self._fragments[:-4000]

    def _node(self, node: int) -> NodeSample:
        point = self._points[-1]
        if node == 3 and not self._has_fourth:
            scheduler = "PENDING (Resources)" if self._elapsed < 240 else "PENDING (Priority)"
            return NodeSample(node=3, state="missing", scheduler=scheduler, job="771204")
        load = HostSample(
            cores=16,
            cpu=0.71 + 0.05 * node,
            load=11.8 + node,
            memory_used=(9 + 2 * node) << 30,
            memory_total=64 << 30,
            throttled=0.0,
            sent_bytes_per_s=610_000.0 + 1000 * node,
            received_bytes_per_s=42_000.0,
        )
        return NodeSample(
            node=node,
            state="joined",
            scheduler="RUNNING",
            job=f"77120{node + 1}",
            host_name=("cn-104", "cn-105", "cn-112", "cn-131")[node],
            pid=30_000 + node,
            time_left_s=14_400.0 - self._elapsed if node else 840.0,
            silent_s=0.2,
            host=load,
            sent_bytes=point.sent_bytes // NODES,
            received_bytes=point.received_bytes // NODES,
            version=self._held[node],
            drift=point.drift,
            drift_se=point.drift_se,
            pulls=sum(self._forms[node].values()),
            forms=dict(self._forms[node]),
            weight_bytes=point.weight_bytes // NODES,
            lags=dict(self._lags[node]),
        )

    def _worker(self, worker: int) -> WorkerSample:
        node = worker // WORKERS_PER_NODE
        first = worker * SLOTS_PER_WORKER
        if node == 3 and not self._has_fourth:
            return WorkerSample(worker, node, (first, first + SLOTS_PER_WORKER - 1), "absent")
        speed = max(self._speed[first : first + SLOTS_PER_WORKER])
        return WorkerSample(
            worker=worker,
            node=node,
            slots=(first, first + SLOTS_PER_WORKER - 1),
            state="running",
            pid=40_000 + worker,
            slot=first,
            phase="step",
            is_busy=True,
            step_s=0.0017 * speed,
            steps_per_s=1100 / speed,
            environment=0.58,
            policy=0.27,
            waiting=0.15,
            losses=sum(self._incarnations[first : first + SLOTS_PER_WORKER]),
        )
