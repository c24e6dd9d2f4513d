"""Train DQN on a stream: workers act without pausing, and the learner publishes a version after each gradient step.

    python examples/dqn.py                      trains CartPole-v1 until it is solved
    python examples/dqn.py --sync always        the newest weights are sent before each fragment

Takes the id of an environment with Box observations and discrete actions; prints a summary of how often weights were
sent and where the time went. The stream is asynchronous, so runs with the same seed differ; the number of gradient
steps per transition is fixed.

On two cores that were not idle, seeds 1 to 8 ended with evaluations of 500, after 4 to 16 seconds and 8 to 32 thousand
steps. There were 29 to 116 times fewer pulls than versions. With `--sync always` there are 16 times fewer, because
weights are sent only between fragments.
"""

import argparse
import copy
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn

import clusterenv as ce

NUM_STEPS = 8  # of each environment in a fragment: short, so that new weights are soon at work
WARMUP_STEPS = 1000
BUFFER_SIZE = 50_000
BATCH_SIZE = 128
# The learner sets the pace by this, and the workers wait for it: how much is learned from a transition does not depend
# on how fast the machine is.
STEPS_PER_UPDATE = 4
TARGET_EVERY = 25  # updates
LEARNING_RATE = 1e-3
GAMMA = 0.99
REWARD_SCALE = 0.1  # Q-values of CartPole-v1 go to 1 / (1 - GAMMA) = 100: bring them near the network's first ones
MAX_GRAD_NORM = 10.0
EPSILON = 0.05
EXPLORATION_STEPS = 10_000  # epsilon falls from 1 to EPSILON over as many
TRIAL_STEPS = 4_000  # between two greedy evaluations that may end the training
EVAL_EPISODES = 64


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="DQN on a ClusterEnv whose workers act")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--workers", type=int, help="default: one per core; 0 acts and steps in this process")
    parser.add_argument("--total-steps", type=int, default=100_000, help="give up after so many transitions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", choices=["always", "aps", "every"], default="aps", help="when weights travel")
    parser.add_argument(
        "--threshold", type=float, default=0.2, help="of aps: the share of states whose greedy action changed"
    )
    parser.add_argument("--every", type=int, default=100, help="of every: how many versions apart")
    parser.add_argument(
        "--target",
        type=float,
        help="stop when a greedy evaluation returns this much (default: the environment's reward_threshold; "
        "`inf` trains to the end)",
    )
    args = parser.parse_args(argv)
    if min(args.num_envs, args.total_steps, args.every) < 1 or (args.workers is not None and args.workers < 0):
        parser.error("--num-envs, --total-steps and --every must be at least 1, --workers at least 0")
    if args.target is None:
        threshold = gym.spec(args.env_id).reward_threshold
        args.target = float("inf") if threshold is None else threshold
    return args


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, n_out))


class Replay:
    """The last transitions, in a ring."""

    def __init__(self, capacity: int, obs_space: gym.spaces.Box, seed: int):
        self.capacity = capacity
        self.added = 0
        self.rng = np.random.default_rng(seed)
        self.obs = np.zeros((capacity, *obs_space.shape), np.float32)
        self.actions = np.zeros(capacity, np.int64)
        self.rewards = np.zeros(capacity, np.float32)
        self.next_obs = np.zeros_like(self.obs)
        self.terminations = np.zeros(capacity, np.float32)

    def add(self, rows) -> int:
        """Takes `Rollout.transitions()`, in which lost rows are left out; returns how many there were."""
        count = len(rows.rewards)
        places = np.arange(self.added, self.added + count) % self.capacity
        for name, values in rows._asdict().items():
            getattr(self, name)[places] = values
        self.added += count
        return count

    def sample(self, size: int) -> list[torch.Tensor]:
        places = self.rng.integers(min(self.added, self.capacity), size=size)
        columns = (self.obs, self.actions, self.rewards, self.next_obs, self.terminations)
        return [torch.from_numpy(column[places]) for column in columns]


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    # Networks this small gain nothing from more threads, and these would take the workers' cores.
    torch.set_num_threads(1)
    rule = {"always": ce.Always(), "aps": ce.APS(threshold=args.threshold), "every": ce.Every(args.every)}[args.sync]

    with ce.ClusterEnv(args.env_id, num_envs=args.num_envs, backend=ce.Local(workers=args.workers)) as envs:
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
            sys.exit(f"{args.env_id}: this example wants observations that are vectors")
        if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
            sys.exit(f"{args.env_id}: this example wants Discrete actions that count from 0")
        q_net = mlp(obs_space.shape[0], int(action_space.n))
        target_net = copy.deepcopy(q_net)
        optimizer = torch.optim.Adam(q_net.parameters(), lr=LEARNING_RATE)
        replay = Replay(BUFFER_SIZE, obs_space, args.seed)
        policy = ce.TorchPolicy(q_net, dist="epsilon-greedy", epsilon=1.0)
        collector = envs.collector(policy, seed=args.seed, sync=rule)

        updates = trials = 0
        next_trial = TRIAL_STEPS
        learning_s = publishing_s = evaluating_s = 0.0
        reached = False
        started = time.perf_counter()

        warmup = envs.collector(ce.RandomPolicy(), seed=args.seed)
        while replay.added < WARMUP_STEPS:
            replay.add(warmup.rollout(NUM_STEPS).transitions())
        steps = warmup_steps = replay.added

        while steps < args.total_steps and not reached:
            for batch in collector.stream(NUM_STEPS):
                steps += replay.add(batch.transitions())
                # A knob travels with the next request, whether weights do or not.
                policy.epsilon = max(EPSILON, 1.0 - (1.0 - EPSILON) * steps / EXPLORATION_STEPS)
                begin = time.perf_counter()
                published_s = 0.0
                while updates < (steps - warmup_steps) // STEPS_PER_UPDATE:
                    learn(q_net, target_net, optimizer, replay.sample(BATCH_SIZE))
                    updates += 1
                    if updates % TARGET_EVERY == 0:
                        target_net.load_state_dict(q_net.state_dict())
                    before = time.perf_counter()
                    collector.publish()
                    published_s += time.perf_counter() - before
                learning_s += time.perf_counter() - begin - published_s
                publishing_s += published_s

                if steps >= min(next_trial, args.total_steps):
                    break  # what the workers have begun is dropped: there is no evaluating while a stream is open
            next_trial += TRIAL_STEPS
            trials += 1
            begin = time.perf_counter()
            trial = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1000 * trials)
            evaluating_s += time.perf_counter() - begin
            # Two standard errors above the target, so that luck with the episodes does not end the training.
            reached = trial.mean - 2.0 * trial.std / EVAL_EPISODES**0.5 >= args.target
            print(
                f"{time.perf_counter() - started:6.1f} s  {steps:>7} steps  greedy return {trial.mean:.1f}  "
                f"epsilon {policy.epsilon:.2f}  updates {updates}  pulls {collector.stats()['pulls']}",
                flush=True,
            )
        seconds = time.perf_counter() - started
        stats = collector.stats()
        collecting_s = warmup.stats()["waiting_s"] + stats["waiting_s"]
        # Other episodes than those that chose the moment to stop.
        evaluation = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1_000_000)

    print(f"steps                 {steps}")
    print(f"seconds               {seconds:.1f}")
    if stats["invalid_rows"]:
        print(f"lost rows             {stats['invalid_rows']}")
    span = f"from {evaluation.returns.min():.0f} to {evaluation.returns.max():.0f}"
    print(f"evaluation            {evaluation.mean:.1f} ({EVAL_EPISODES} greedy episodes, {span})")
    if np.isfinite(args.target):
        print(f"target                {args.target:g} {'reached' if evaluation.mean >= args.target else 'not reached'}")
    print(f"updates               {updates}")
    print(f"pulls                 {stats['pulls']}")
    print(f"weight bytes          {stats['weight_bytes']}")
    print(f"against every update  {(stats['version'] + 1) / max(1, stats['pulls']):.1f} x fewer pulls")

    # `collecting`: the head starts the workers, waits for fragments, copies them and measures drift.
    spent = {"collecting": collecting_s, "learning": learning_s, "publishing": publishing_s, "evaluating": evaluating_s}
    spent["other"] = seconds - sum(spent.values())
    print("\nwhere the time went")
    for name, value in spent.items():
        print(f"{name:<11} {value:7.1f} s {value / seconds:6.1%}")
    # The mean over workers, in the same seconds: they act and step while the head learns.
    print("\nmeanwhile, in a worker")
    for name in ("environment", "policy"):
        value = stats["busy_s"][name]
        print(f"{name:<11} {value:7.1f} s {value / seconds:6.1%}")


def learn(q_net: nn.Module, target_net: nn.Module, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]) -> None:
    """One gradient step of double DQN."""
    obs, actions, rewards, next_obs, terminations = batch
    with torch.no_grad():
        best = q_net(next_obs).argmax(1, keepdim=True)
        following = target_net(next_obs).gather(1, best).squeeze(1)
        # Truncated episodes would have gone on: only termination ends the return.
        goal = REWARD_SCALE * rewards + GAMMA * (1.0 - terminations) * following
    value = q_net(obs).gather(1, actions[:, None]).squeeze(1)
    loss = nn.functional.smooth_l1_loss(value, goal)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(q_net.parameters(), MAX_GRAD_NORM)
    optimizer.step()


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        train(args)
    except KeyboardInterrupt:
        print("interrupted; the environments are closed", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
