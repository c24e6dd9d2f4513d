"""Train IMPALA: workers act continuously with the policy they have, and the learner corrects for its age with V-trace.

    python examples/impala.py                       trains CartPole-v1 until it is solved
    python examples/impala.py --sync always         the same, with weights sent to the workers after each update

Takes the id of an environment with Box observations and discrete actions; prints a summary. `collector.stream` returns
a worker's fragment when it is done, the learner makes one gradient step on it, and `collector.publish` makes a new
version of the policy; `--sync` decides which versions are sent to the workers. Compare `ppo_detach.py`, where the
workers wait while the head learns.

On two cores that were not idle, seeds 1 to 8 ended with evaluations from 499 to 500, after 11 to 39 seconds and 345 to
821 thousand steps, and pulled weights 27 to 51 times for 338 to 803 versions of the policy. Fragments arrive in a
different order every time, so no two runs are equal. LunarLander-v3 was not solved reliably with any constants tried.
"""

import argparse
import dataclasses
import random
import sys
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import clusterenv as ce
from clusterenv.learning import effective_sample_size, vtrace

# Tuned on CartPole-v1 with 64 environments.
NUM_STEPS = 32
LEARNING_RATE = 1e-3
GAMMA = 0.99
ENTROPY_COEF = 0.01
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5
# Brings returns of some hundreds near 1. The critic's error would otherwise fill the clipped gradient.
REWARD_SCALE = 0.03
EVAL_EPISODES = 64
RECENT_EPISODES = 100  # over as many `collector.summary()` takes its means


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="IMPALA on a ClusterEnv whose workers act")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, help="default: one per core; 0 acts and steps in this process")
    parser.add_argument("--total-steps", type=int, default=2_000_000, help="give up after so many transitions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target",
        type=float,
        help=f"stop when the last {RECENT_EPISODES} episodes return this much on average and a greedy "
        "evaluation confirms it (default: the environment's reward_threshold; `inf` trains to the end)",
    )
    parser.add_argument("--sync", choices=("aps", "always", "every"), default="aps", help="when weights travel")
    parser.add_argument("--threshold", type=float, default=0.02, help="aps: pull above this mean KL per state")
    parser.add_argument("--every", type=int, default=4, metavar="K", help="every: pull at each K-th version")
    args = parser.parse_args(argv)
    if min(args.num_envs, args.total_steps) < 1 or (args.workers is not None and args.workers < 0):
        parser.error("--num-envs and --total-steps must be at least 1, --workers at least 0")
    if not 0.0 <= args.threshold < float("inf") or args.every < 1:
        parser.error("--threshold must be 0 or more, --every at least 1")
    if args.target is None:
        threshold = gym.spec(args.env_id).reward_threshold
        args.target = float("inf") if threshold is None else threshold
    return args


def layer(n_in: int, n_out: int, gain: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """Has the shape of CleanRL's agents, which a collector recognises; only `actor` travels to the workers."""

    def __init__(self, obs_size: int, num_actions: int):
        super().__init__()
        self.critic = nn.Sequential(layer(obs_size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, gain=1.0))
        # A small last gain starts the policy near uniform, whatever the observations' scale.
        self.actor = nn.Sequential(
            layer(obs_size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, num_actions, gain=0.01)
        )

    def get_value(self, obs):
        return self.critic(obs)

    def get_action_and_value(self, obs, action=None):
        policy = Categorical(logits=self.actor(obs), validate_args=False)
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(obs)


def train(args: argparse.Namespace) -> None:
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    # Networks this small gain nothing from more threads, and these would take the workers' cores.
    torch.set_num_threads(1)

    with ce.ClusterEnv(args.env_id, num_envs=args.num_envs, backend=ce.Local(workers=args.workers)) as envs:
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
            sys.exit(f"{args.env_id}: this example wants observations that are vectors")
        if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
            sys.exit(f"{args.env_id}: this example wants Discrete actions that count from 0")
        agent = Agent(obs_space.shape[0], int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
        rules = {"aps": ce.APS(threshold=args.threshold), "always": ce.Always(), "every": ce.Every(args.every)}
        collector = envs.collector(agent, seed=args.seed, sync=rules[args.sync])

        steps = updates = episodes = tries = 0
        next_try = RECENT_EPISODES
        next_line_s = learning_s = evaluating_s = 0.0
        lags: list[int] = []
        sizes: list[float] = []  # effective sample sizes, as an update starts
        reached = False
        started = time.perf_counter()

        while steps < args.total_steps and not reached:
            for batch in collector.stream(NUM_STEPS):
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - steps / args.total_steps)
                steps += int(batch.valid.sum())
                episodes += len(batch.episodes)
                lags += [receipt.lag for receipt in batch.receipts]

                begin = time.perf_counter()
                sizes.append(learn(agent, optimizer, batch.torch()))
                collector.publish()
                updates += 1
                learning_s += time.perf_counter() - begin

                mean_return = collector.summary()["charts/episodic_return"]
                elapsed_s = time.perf_counter() - started
                if elapsed_s >= next_line_s:
                    next_line_s = elapsed_s + 3.0
                    print(
                        f"{elapsed_s:6.1f} s  {steps:>8} of {args.total_steps} steps  "
                        f"{steps / elapsed_s:6.0f} steps/s  mean return {mean_return:.1f}  episodes {episodes}  "
                        f"lag {np.mean(lags[-100:]):.1f}  pulls {collector.stats()['pulls']} of {updates}",
                        flush=True,
                    )
                if steps >= args.total_steps or (episodes >= next_try and mean_return >= args.target):
                    break

            # An evaluation needs the workers, so the stream is left; what was under way is dropped.
            if mean_return >= args.target:
                next_try = episodes + RECENT_EPISODES
                tries += 1
                begin = time.perf_counter()
                trial = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1000 * tries)
                evaluating_s += time.perf_counter() - begin
                # Two standard errors above the target, so that luck with the episodes does not end the training.
                reached = trial.mean - 2.0 * trial.std / EVAL_EPISODES**0.5 >= args.target
        seconds = time.perf_counter() - started
        stats = collector.stats()
        # Other episodes than those that chose the moment to stop.
        evaluation = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1_000_000)

    versions = stats["version"] + 1
    print(f"steps       {steps}")
    print(f"seconds     {seconds:.1f}")
    print(f"steps/s     {steps / seconds:.0f} (acting and learning)")
    if stats["invalid_rows"]:
        print(f"lost rows   {stats['invalid_rows']}")
    span = f"from {evaluation.returns.min():.0f} to {evaluation.returns.max():.0f}"
    print(f"evaluation  {evaluation.mean:.1f} ({EVAL_EPISODES} greedy episodes, {span})")
    if np.isfinite(args.target):
        print(f"target      {args.target:g} {'reached' if evaluation.mean >= args.target else 'not reached'}")
    print(f"updates     {updates}")
    saved = f"at every update {versions}, {versions / stats['pulls']:.1f} times as many bytes"
    print(f"pulls       {stats['pulls']} ({saved})")
    print(f"bytes       {stats['weight_bytes']} of weights")
    print(f"lag         {np.mean(lags):.1f} versions (mean; {np.max(lags)} at most)")
    print(f"ESS         {np.median(sizes):.3f} (median effective sample size as an update starts)")

    print("\nwhere the head's time went")
    spent = {"waiting": stats["waiting_s"], "learning": learning_s, "evaluating": evaluating_s}
    spent["other"] = seconds - sum(spent.values())
    for name, value in spent.items():
        print(f"{name:<11} {value:7.1f} s {value / seconds:6.1%}")
    # The workers go on while the head learns, so theirs are shares of the whole time.
    print("\nand a worker's")
    busy = dict(stats["busy_s"])
    busy["idle"] = seconds - sum(busy.values())
    for name, value in busy.items():
        print(f"{name:<11} {value:7.1f} s {value / seconds:6.1%}")


def learn(agent: Agent, optimizer: torch.optim.Optimizer, batch: ce.Rollout) -> float:
    """One gradient step on the valid rows of a fragment of tensors; returns their effective sample size."""
    batch = dataclasses.replace(batch, rewards=batch.rewards * REWARD_SCALE)
    # Rows of an environment that was lost hold fillers. Select: what is masked by multiplying still counts in a mean.
    rows = batch.valid
    if not rows.any():
        return 0.0
    _, logprobs, entropies, values = agent.get_action_and_value(batch.obs[rows], batch.actions[rows])
    newest = batch.logprobs.clone()
    newest[rows] = logprobs.detach()
    target = vtrace(batch, agent.get_value, newest, GAMMA)
    policy_loss = -(logprobs * target.advantages[rows]).mean()
    value_loss = (values.squeeze(-1) - target.returns[rows]).square().mean()
    loss = policy_loss + VALUE_COEF * value_loss - ENTROPY_COEF * entropies.mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return effective_sample_size(batch, newest)


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
