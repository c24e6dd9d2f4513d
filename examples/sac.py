"""Train SAC on a stream: tanh-Gaussian actor, twin critics, tuned entropy; each gradient step publishes a version.

    python examples/sac.py                      trains Pendulum-v1 until it swings up and holds
    python examples/sac.py --sync always        the newest weights are sent before each fragment

Takes the id of an environment with Box observations and bounded Box actions; prints a summary of how often weights were
sent and where the time went. Only the actor's weights are sent: see `acting` below. The stream is asynchronous, so runs
with the same seed differ; the number of gradient steps per transition is fixed.

On two cores that were not idle, seeds 1 to 8 ended with evaluations from -165 to -156, after 21 to 27 seconds and 16
thousand steps. There were 59 to 101 times fewer pulls than versions. With `--sync always` there are 16 times fewer,
because weights are sent only between fragments.
"""

import argparse
import copy
import math
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Normal

import clusterenv as ce

NUM_STEPS = 8  # of each environment in a fragment: short, so that new weights are soon at work
WARMUP_STEPS = 1000
BUFFER_SIZE = 100_000
BATCH_SIZE = 128
# The learner sets the pace by this, and the workers wait for it: how much is learned from a transition does not depend
# on how fast the machine is.
STEPS_PER_UPDATE = 4
LEARNING_RATE = 1e-3
GAMMA = 0.99
TAU = 0.01
REWARD_SCALE = 0.1  # rewards of Pendulum-v1 are from -16 to 0
TRIAL_STEPS = 4_000  # between two greedy evaluations that may end the training
EVAL_EPISODES = 64


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="SAC on a ClusterEnv whose workers act")
    parser.add_argument("--env-id", default="Pendulum-v1")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--workers", type=int, help="default: one per core; 0 acts and steps in this process")
    parser.add_argument("--total-steps", type=int, default=50_000, help="give up after so many transitions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sync", choices=["always", "aps", "every"], default="aps", help="when weights travel")
    parser.add_argument("--threshold", type=float, default=0.05, help="of aps: mean KL per state")
    parser.add_argument("--every", type=int, default=100, help="of every: how many versions apart")
    parser.add_argument(
        "--target",
        type=float,
        default=-200.0,
        help="stop when a greedy evaluation returns this much (`inf` trains to the end)",
    )
    args = parser.parse_args(argv)
    if min(args.num_envs, args.total_steps, args.every) < 1 or (args.workers is not None and args.workers < 0):
        parser.error("--num-envs, --total-steps and --every must be at least 1, --workers at least 0")
    return args


def mlp(n_in: int, n_out: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(n_in, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, n_out))


class Agent(nn.Module):
    def __init__(self, obs_space: gym.spaces.Box, action_space: gym.spaces.Box):
        super().__init__()
        obs_size, action_size = obs_space.shape[0], action_space.shape[0]
        self.actor = mlp(obs_size, 2 * action_size)
        self.critics = nn.ModuleList(mlp(obs_size + action_size, 1) for _ in range(2))
        # Plain tensors, no buffers: the workers squash by the action space itself.
        self.scale = torch.from_numpy((action_space.high - action_space.low) / 2).float()
        self.middle = torch.from_numpy((action_space.high + action_space.low) / 2).float()

    def forward(self, obs):
        """What the workers run: mean and log standard deviation before the squash, as dist="tanh-normal" has them."""
        mean, log_std = self.actor(obs).chunk(2, dim=1)
        return mean, log_std.clamp(-5.0, 2.0)

    def act(self, obs):
        """Actions, and their log-probabilities in units of the action space's half width."""
        mean, log_std = self(obs)
        normal = Normal(mean, log_std.exp(), validate_args=False)
        before = normal.rsample()
        # log(1 - tanh(x)^2), written so that it stays exact far out
        squash = 2.0 * (math.log(2.0) - before - nn.functional.softplus(-2.0 * before))
        logprob = (normal.log_prob(before) - squash).sum(1)
        return before.tanh() * self.scale + self.middle, logprob


def values(critics: nn.ModuleList, obs: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
    """Of both critics, [2, B]."""
    inputs = torch.cat((obs, actions), 1)
    return torch.stack([critic(inputs).squeeze(1) for critic in critics])


class Replay:
    """The last transitions, in a ring."""

    def __init__(self, capacity: int, obs_space: gym.spaces.Box, action_space: gym.spaces.Box, seed: int):
        self.capacity = capacity
        self.added = 0
        self.rng = np.random.default_rng(seed)
        self.obs = np.zeros((capacity, *obs_space.shape), np.float32)
        self.actions = np.zeros((capacity, *action_space.shape), np.float32)
        self.rewards = np.zeros(capacity, np.float32)
        self.next_obs = np.zeros_like(self.obs)
        self.terminations = np.zeros(capacity, np.float32)

    def add(self, rows) -> int:
        """Takes `Rollout.transitions()`, in which lost rows are left out; returns how many there were."""
        count = len(rows.rewards)
        places = np.arange(self.added, self.added + count) % self.capacity
        for name, column in rows._asdict().items():
            getattr(self, name)[places] = column
        self.added += count
        return count

    def sample(self, size: int) -> list[torch.Tensor]:
        places = self.rng.integers(min(self.added, self.capacity), size=size)
        columns = (self.obs, self.actions, self.rewards, self.next_obs, self.terminations)
        return [torch.from_numpy(column[places]) for column in columns]


class Learner:
    def __init__(self, agent: Agent):
        self.agent = agent
        self.target_critics = copy.deepcopy(agent.critics).requires_grad_(False)
        self.log_alpha = torch.zeros((), requires_grad=True)
        self.target_entropy = -float(len(agent.scale))
        self.critic_optimizer = torch.optim.Adam(agent.critics.parameters(), lr=LEARNING_RATE)
        self.actor_optimizer = torch.optim.Adam(agent.actor.parameters(), lr=LEARNING_RATE)
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=LEARNING_RATE)

    def learn(self, obs, actions, rewards, next_obs, terminations):
        """One gradient step of the critics, the actor and the entropy's weight."""
        agent, alpha = self.agent, self.log_alpha.exp().item()
        with torch.no_grad():
            next_actions, next_logprobs = agent.act(next_obs)
            following = values(self.target_critics, next_obs, next_actions).amin(0) - alpha * next_logprobs
            # Truncated episodes would have gone on: only termination ends the return.
            goal = REWARD_SCALE * rewards + GAMMA * (1.0 - terminations) * following
        critic_loss = (values(agent.critics, obs, actions) - goal).square().mean(1).sum()
        self.critic_optimizer.zero_grad()
        critic_loss.backward()
        self.critic_optimizer.step()

        own_actions, logprobs = agent.act(obs)
        actor_loss = (alpha * logprobs - values(agent.critics, obs, own_actions).amin(0)).mean()
        self.actor_optimizer.zero_grad()
        actor_loss.backward(inputs=list(agent.actor.parameters()))
        self.actor_optimizer.step()

        alpha_loss = -self.log_alpha.exp() * (logprobs.detach().mean() + self.target_entropy)
        self.alpha_optimizer.zero_grad()
        alpha_loss.backward()
        self.alpha_optimizer.step()

        with torch.no_grad():
            for old, new in zip(self.target_critics.parameters(), agent.critics.parameters(), strict=True):
                old.lerp_(new, TAU)


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    # Networks this small gain nothing from more threads, and these would take the workers' cores.
    torch.set_num_threads(1)
    rule = {"always": ce.Always(), "aps": ce.APS(threshold=args.threshold), "every": ce.Every(args.every)}[args.sync]

    with ce.ClusterEnv(args.env_id, num_envs=args.num_envs, backend=ce.Local(workers=args.workers)) as envs:
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
            sys.exit(f"{args.env_id}: this example wants observations that are vectors")
        if not isinstance(action_space, gym.spaces.Box) or len(action_space.shape) != 1:
            sys.exit(f"{args.env_id}: this example wants actions that are vectors")
        agent = Agent(obs_space, action_space)
        learner = Learner(agent)
        replay = Replay(BUFFER_SIZE, obs_space, action_space, args.seed)
        policy = ce.TorchPolicy(agent, dist="tanh-normal", acting=["actor"])
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
                begin = time.perf_counter()
                published_s = 0.0
                while updates < (steps - warmup_steps) // STEPS_PER_UPDATE:
                    learner.learn(*replay.sample(BATCH_SIZE))
                    updates += 1
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
                f"alpha {learner.log_alpha.exp():.3f}  updates {updates}  pulls {collector.stats()['pulls']}",
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
