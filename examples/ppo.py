"""Train PPO, in one file, on environments that ClusterEnv steps in other processes.

    python examples/ppo.py                                  trains CartPole-v1 until it is solved
    python examples/ppo.py --demo --plot runs/demo.png      the same, with a live display and a curve
    python examples/ppo.py --backend slurm --nodes 4 --option partition=cpu    the same, on four nodes of a cluster

Takes the id of an environment with Box observations and discrete actions; prints a summary, and draws a plot on
request. Three things need care with a vector environment that resets itself and may lose a process: they are marked
TRUNCATION, RESET ROWS and LOST ROWS below.
"""

import argparse
import collections
import contextlib
import json
import random
import sys
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import clusterenv as ce

# Tuned on CartPole-v1 with 16 environments, which these solve in about 90 thousand steps.
NUM_STEPS = 64
EPOCHS = 8
MINIBATCH_SIZE = 256
LEARNING_RATE = 1e-3
GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.2
ENTROPY_COEF = 0.01
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5
EVAL_EPISODES = 20
RECENT_EPISODES = 100


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on a ClusterEnv of local processes")
    parser.add_argument("--env-id", default="CartPole-v1")
    parser.add_argument("--num-envs", type=int, default=16)
    parser.add_argument("--workers", type=int, help="default: one per core; 0 steps in this process")
    parser.add_argument("--backend", choices=["local", "slurm", "kubernetes", "ray"], default="local")
    parser.add_argument("--nodes", type=int, default=2, help="machines of a cluster")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of the backend, as JSON")
    parser.add_argument("--total-steps", type=int, default=500_000, help="give up after so many transitions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--target",
        type=float,
        help=f"stop when the last {RECENT_EPISODES} episodes return this much on average and a greedy "
        "evaluation confirms it (default: the environment's reward_threshold; `inf` trains to the end)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the return of every episode")
    parser.add_argument("--demo", action="store_true", help="live display (plain lines if not on a terminal)")
    args = parser.parse_args(argv)
    if min(args.num_envs, args.total_steps) < 1 or (args.workers is not None and args.workers < 0):
        parser.error("--num-envs and --total-steps must be at least 1, --workers at least 0")
    if args.target is None:
        threshold = gym.spec(args.env_id).reward_threshold
        args.target = float("inf") if threshold is None else threshold
    return args


def make_backend(args: argparse.Namespace) -> ce.Local | ce.Slurm | ce.Kubernetes | ce.Ray:
    if args.backend == "local":
        return ce.Local(workers=args.workers)
    options = {}
    for option in args.option:
        name, _, value = option.partition("=")
        try:
            options[name] = json.loads(value)
        except ValueError:
            options[name] = value
    kinds = {"slurm": ce.Slurm, "kubernetes": ce.Kubernetes, "ray": ce.Ray}
    return kinds[args.backend](nodes=args.nodes, **options)


def layer(n_in: int, n_out: int, gain: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(n_in, n_out)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    def __init__(self, obs_size: int, num_actions: int):
        super().__init__()
        self.critic = nn.Sequential(layer(obs_size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, 1, gain=1.0))
        # A small last gain starts the policy near uniform, whatever the observations' scale.
        self.actor = nn.Sequential(
            layer(obs_size, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, num_actions, gain=0.01)
        )

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs.flatten(1)).squeeze(-1)

    def policy(self, obs: torch.Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs.flatten(1)), validate_args=False)


def gae(rewards, values, terminations, valid, gamma=GAMMA, lam=GAE_LAMBDA):
    """Advantages [T, N]; `values` is [T + 1, N], its last row that of the observation after the rollout."""
    advantages = np.zeros_like(rewards)
    following = np.zeros_like(rewards[0])
    for t in reversed(range(len(rewards))):
        # TRUNCATION: only termination means that nothing more could have been earned. A truncated episode
        # would have gone on, so its last row bootstraps like any other. In next-step autoreset values[t + 1]
        # is then that of the true last observation: the new episode's first one comes a row later.
        next_value = values[t + 1] * (1.0 - terminations[t])
        delta = rewards[t] + gamma * next_value - values[t]
        # An episode's last valid row is followed by one that is not (RESET ROWS, LOST ROWS). The advantage
        # of 0 there cuts the sum, so that no credit flows from one episode into the one before.
        following = np.where(valid[t], delta + gamma * lam * following, 0.0)
        advantages[t] = following
    return advantages


@torch.no_grad()
def evaluate(agent: Agent, env_id: str, seed: int) -> list[float]:
    """Returns of whole greedy episodes, in an environment that shares nothing with the training ones."""
    returns = []
    env = gym.make(env_id)
    try:
        for episode in range(EVAL_EPISODES):
            obs, _ = env.reset(seed=seed + episode)
            total, done = 0.0, False
            while not done:
                logits = agent.actor(torch.as_tensor(obs, dtype=torch.float32).flatten())
                obs, reward, terminated, truncated, _ = env.step(int(logits.argmax()))
                total += float(reward)
                done = terminated or truncated
            returns.append(total)
    finally:
        env.close()
    return returns


def train(args: argparse.Namespace) -> None:
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    # Networks this small gain nothing from more threads, and these would take the environments' cores.
    torch.set_num_threads(1)

    envs = ce.ClusterEnv(args.env_id, num_envs=args.num_envs, backend=make_backend(args))
    where = f"{args.nodes} {args.backend} nodes, " if args.backend != "local" else ""
    args.workers_shown = f"{where}workers {envs.stats()['workers']}"
    try:
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or not isinstance(action_space, gym.spaces.Discrete):
            sys.exit(f"{args.env_id}: this example wants Box observations and Discrete actions")
        if action_space.start != 0:
            sys.exit(f"{args.env_id}: this example wants actions that count from 0")
        agent = Agent(int(np.prod(obs_space.shape)), int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)

        shape = (NUM_STEPS, args.num_envs)
        all_obs = np.zeros(shape + obs_space.shape, np.float32)
        actions = np.zeros(shape, np.int64)
        logprobs = np.zeros(shape, np.float32)
        rewards = np.zeros(shape, np.float32)
        terminations = np.zeros(shape, np.float32)
        valid = np.zeros(shape, bool)
        values = np.zeros((NUM_STEPS + 1, args.num_envs), np.float32)

        steps = lost_rows = 0
        running_returns = np.zeros(args.num_envs)
        history: list[tuple[int, float]] = []  # (steps so far, return) of every whole episode
        recent: collections.deque[float] = collections.deque(maxlen=RECENT_EPISODES)
        evaluation: list[float] = []
        reached = False

        obs, _ = envs.reset(seed=args.seed)
        resetting = np.zeros(args.num_envs, bool)
        started = time.perf_counter()

        with LiveDisplay(args) if args.demo and sys.stdout.isatty() else LineDisplay(args) as display:
            while steps < args.total_steps and not reached:
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - steps / args.total_steps)

                for t in range(NUM_STEPS):
                    all_obs[t] = obs
                    with torch.no_grad():
                        obs_t = torch.from_numpy(all_obs[t])
                        policy = agent.policy(obs_t)
                        action = policy.sample()
                        logprobs[t] = policy.log_prob(action).numpy()
                        values[t] = agent.value(obs_t).numpy()
                    actions[t] = action.numpy()

                    obs, rewards[t], terminated, truncated, infos = envs.step(actions[t])
                    terminations[t] = terminated

                    # RESET ROWS: the step after an episode's end ignores the action and only delivers the
                    # first observation of the next episode. To learn from it would credit an action that
                    # was never taken.
                    valid[t] = ~resetting
                    # LOST ROWS: the process of this environment died, so nobody knows what the action led to.
                    # The row ends its episode as a truncation does, but its reward of 0 is a filler and not a
                    # result: learn nothing from it, and keep the broken episode out of the statistics.
                    lost = ~infos.get("transition_valid", np.ones(args.num_envs, bool))
                    valid[t] &= ~lost
                    lost_rows += int(lost.sum())

                    steps += int(valid[t].sum())
                    running_returns += np.where(valid[t], rewards[t], 0.0)
                    resetting = terminated | truncated | lost
                    for slot in np.flatnonzero(resetting & valid[t]):
                        history.append((steps, float(running_returns[slot])))
                        recent.append(float(running_returns[slot]))
                    running_returns[resetting] = 0.0

                with torch.no_grad():
                    values[NUM_STEPS] = agent.value(torch.as_tensor(obs, dtype=torch.float32)).numpy()
                advantages = gae(rewards, values, terminations, valid)
                learn(agent, optimizer, all_obs, actions, logprobs, advantages, values[:-1], valid)

                mean_return = float(np.mean(recent)) if recent else float("nan")
                display.update(steps, time.perf_counter() - started, mean_return, len(history), lost_rows)

                if len(recent) == RECENT_EPISODES and mean_return >= args.target:
                    evaluation = evaluate(agent, args.env_id, args.seed + 1_000_000)
                    reached = float(np.mean(evaluation)) >= args.target
                    # If the evaluation disagrees, train on; the next attempt waits for as many new episodes.
                    recent.clear()
        seconds = time.perf_counter() - started
    finally:
        envs.close()

    if not reached:
        evaluation = evaluate(agent, args.env_id, args.seed + 1_000_000)
        reached = float(np.mean(evaluation)) >= args.target
    print(f"steps       {steps}")
    print(f"seconds     {seconds:.1f}")
    print(f"steps/s     {steps / seconds:.0f} (acting and learning)")
    if lost_rows:
        print(f"lost rows   {lost_rows}")
    span = f"from {min(evaluation):g} to {max(evaluation):g}"
    print(f"evaluation  {np.mean(evaluation):.1f} ({len(evaluation)} greedy episodes, {span})")
    if np.isfinite(args.target):
        print(f"target      {args.target:g} {'reached' if reached else 'not reached'}")
    if args.plot:
        plot(args, history)
        print(f"plot        {args.plot}")


def learn(agent, optimizer, obs, actions, logprobs, advantages, values, valid):
    """One PPO update on the valid rows of [T, N] arrays."""
    rows = torch.from_numpy(valid)
    obs, actions, logprobs, advantages, values = (
        torch.from_numpy(array)[rows] for array in (obs, actions, logprobs, advantages, values)
    )
    returns = advantages + values
    # Fewer than two rows have no standard deviation; this happens when almost everything was lost.
    if len(returns) < 2:
        return
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    minibatches = max(1, round(len(returns) / MINIBATCH_SIZE))
    for _ in range(EPOCHS):
        for index in torch.randperm(len(returns)).chunk(minibatches):
            policy = agent.policy(obs[index])
            ratio = (policy.log_prob(actions[index]) - logprobs[index]).exp()
            gain = torch.min(ratio * advantages[index], ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages[index])
            value_error = (agent.value(obs[index]) - returns[index]).square()
            loss = VALUE_COEF * value_error.mean() - gain.mean() - ENTROPY_COEF * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()


class LineDisplay(contextlib.AbstractContextManager):
    """A plain line every few seconds."""

    interval_s = 3.0

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.due_s = 0.0

    def __exit__(self, *_):
        return None

    def update(self, steps: int, elapsed_s: float, mean_return: float, episodes: int, lost_rows: int) -> None:
        if elapsed_s < self.due_s:
            return
        self.due_s = elapsed_s + self.interval_s
        print(
            f"{elapsed_s:6.1f} s  {steps:>8} of {self.args.total_steps} steps  "
            f"{steps / elapsed_s:6.0f} steps/s  mean return {mean_return:.1f}  episodes {episodes}  "
            f"{self.args.workers_shown}" + (f"  lost rows {lost_rows}" if lost_rows else ""),
            flush=True,
        )


class LiveDisplay(contextlib.AbstractContextManager):
    """A panel that redraws itself in place."""

    def __init__(self, args: argparse.Namespace):
        from rich.live import Live

        self.args = args
        self.curve: list[float] = []
        self.live = Live(refresh_per_second=8)

    def __enter__(self):
        self.live.start()
        return self

    def __exit__(self, *_):
        self.live.stop()

    def update(self, steps: int, elapsed_s: float, mean_return: float, episodes: int, lost_rows: int) -> None:
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        if np.isfinite(mean_return):
            self.curve.append(mean_return)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", width=12)
        table.add_column(width=44)
        minutes, seconds = divmod(int(elapsed_s), 60)
        target = f"  [dim]target {self.args.target:g}[/]" if np.isfinite(self.args.target) else ""
        lost = f"  [red]{lost_rows} lost rows[/]" if lost_rows else ""
        table.add_row("progress", ProgressBar(self.args.total_steps, min(steps, self.args.total_steps), width=44))
        table.add_row("steps", f"{steps:,} of at most {self.args.total_steps:,}")
        table.add_row("steps/s", f"{steps / elapsed_s:,.0f}")
        table.add_row("mean return", f"[bold]{mean_return:.1f}[/]{target}")
        table.add_row("", f"[cyan]{sparkline(self.curve, 44)}[/]")
        table.add_row("episodes", f"{episodes:,}")
        table.add_row("where", f"{self.args.workers_shown} for {self.args.num_envs} environments{lost}")
        table.add_row("elapsed", f"{minutes}:{seconds:02d}")
        self.live.update(Panel(table, title=f"PPO on {self.args.env_id}", expand=False))


def sparkline(curve: list[float], width: int) -> str:
    if not curve:
        return ""
    low, high = min(curve), max(curve)
    picked = [curve[i] for i in np.linspace(0, len(curve) - 1, min(width, len(curve))).astype(int)]
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (value - low) / (high - low or 1.0))] for value in picked)


def plot(args: argparse.Namespace, history: list[tuple[int, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no window: this may run on a machine without a screen
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if history:
        steps, returns = np.array(history).T
        sums = np.cumsum(np.concatenate(([0.0], returns)))
        last = np.arange(1, len(returns) + 1)
        first = np.maximum(0, last - RECENT_EPISODES)
        axes.scatter(steps, returns, s=6, alpha=0.3, linewidths=0, label="episode")
        axes.plot(steps, (sums[last] - sums[first]) / (last - first), color="C1", label=f"mean of {RECENT_EPISODES}")
    if np.isfinite(args.target):
        axes.axhline(args.target, color="grey", linestyle="--", linewidth=1, label="target")
    axes.set(xlabel="environment steps", ylabel="episode return", title=f"PPO on {args.env_id}, seed {args.seed}")
    axes.set_xlim(left=0)
    axes.legend(loc="lower right", markerscale=2)
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=120)
    plt.close(figure)


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
