"""Train PPO where the workers act: each has a copy of the policy, steps its environments, and returns whole rollouts.

    python examples/ppo_detach.py                                       trains LunarLander-v3 until it is solved
    python examples/ppo_detach.py --demo --plot runs/ppo_detach.png     the same, with a live display and a curve
    python examples/ppo_detach.py --sync always                         weights are sent after every update
    python examples/ppo_detach.py --resume runs/lander                  continues a run that was killed

Observations are vectors, actions discrete. Compare `ppo.py`, where the head acts and the workers only step: here there
is no loop over steps, there are no reset rows, and advantages come from `clusterenv.learning`. Weights are sent only
when the newest policy differs enough from the acting one (`--sync aps`, see docs/aps.md): the loss allows for old data.

On two cores that were not idle, seeds 1 to 8 ended with evaluations from 253 to 265, after 33 to 56 seconds and 475 to
573 thousand steps, and pulled weights 12 to 15 times for 30 to 36 versions.
"""

import argparse
import contextlib
import dataclasses
import random
import sys
import time
from pathlib import Path
from typing import NamedTuple

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical, kl_divergence

import clusterenv as ce
from clusterenv.learning import behaviour_weights, effective_sample_size, gae

# Tuned on LunarLander-v3 with 64 environments.
NUM_STEPS = 256
EPOCHS = 6
MINIBATCH_SIZE = 512
LEARNING_RATE = 1e-3
GAMMA = 0.999
GAE_LAMBDA = 0.98
CLIP = 0.2
ENTROPY_COEF = 0.003
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5
# Brings returns of some hundreds near 1. The critic's error would otherwise fill the clipped gradient.
REWARD_SCALE = 0.03
EVAL_EPISODES = 64
RECENT_EPISODES = 100  # over as many `collector.summary()` takes its means


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="PPO on a ClusterEnv whose workers act")
    parser.add_argument("--env-id", default="LunarLander-v3")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, help="default: one per core; 0 acts and steps in this process")
    parser.add_argument("--total-steps", type=int, default=1_500_000, help="give up after so many transitions")
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
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw the returns, and when weights travelled")
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="save there after each update, and go on from it")
    parser.add_argument("--demo", action="store_true", help="live display (plain lines if not on a terminal)")
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

    journal, checkpoint = (args.resume and args.resume / name for name in ("journal", "checkpoint.pt"))
    with ce.ClusterEnv(args.env_id, args.num_envs, backend=ce.Local(workers=args.workers), resume=journal) as envs:
        args.workers = envs.stats()["workers"]
        obs_space, action_space = envs.single_observation_space, envs.single_action_space
        if not isinstance(obs_space, gym.spaces.Box) or len(obs_space.shape) != 1:
            sys.exit(f"{args.env_id}: this example wants observations that are vectors")
        if not isinstance(action_space, gym.spaces.Discrete) or action_space.start != 0:
            sys.exit(f"{args.env_id}: this example wants Discrete actions that count from 0")
        agent = Agent(obs_space.shape[0], int(action_space.n))
        optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
        parts = {"agent": agent, "optimizer": optimizer, "envs": envs}
        saved = load(checkpoint, parts) if checkpoint and checkpoint.exists() else {}
        rules = {"aps": ce.APS(threshold=args.threshold), "always": ce.Always(), "every": ce.Every(args.every)}
        collector = envs.collector(agent, seed=args.seed, sync=rules[args.sync])

        steps, tries, next_try, reached, before_s = saved.get("progress", (0, 0, RECENT_EPISODES, False, 0.0))
        pulls, learning_s, evaluating_s = 0, 0.0, 0.0
        history: list[tuple[int, float]] = saved.setdefault("history", [])  # (steps so far, return) of whole episodes
        updates: list[Update] = saved.setdefault("updates", [])
        # Of every rollout: steps before it, drift of the workers' policy from the newest, whether they pulled that.
        requests: list[tuple[int, float, bool]] = saved.setdefault("requests", [])
        started = time.perf_counter() - before_s

        with LiveDisplay(args) if args.demo and sys.stdout.isatty() else LineDisplay(args) as display:
            while steps < args.total_steps and not reached:
                optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - steps / args.total_steps)

                # The agent as it is now is a new version; whether the workers get it is for the rule to say.
                asked_at = steps
                batch = collector.rollout(NUM_STEPS).torch()
                ends = steps + (batch.episodes.t + 1) * args.num_envs
                history += zip(ends.tolist(), batch.episodes.returns.tolist(), strict=True)
                steps += int(batch.valid.sum())

                begin = time.perf_counter()
                updates.append(learn(agent, optimizer, batch))
                learning_s += time.perf_counter() - begin

                stats = collector.stats()
                pulled, pulls = stats["pulls"] > pulls, stats["pulls"]
                # After a pull the receipts say 0; what made the rule pull is kept apart. Only APS measures drift.
                drift = stats["drift_at_pull"] if pulled else batch.receipts[0].drift
                requests.append((asked_at, updates[-1].drift if drift is None else drift, pulled))

                summary = collector.summary()
                mean_return = summary["charts/episodic_return"]
                display.update(steps, time.perf_counter() - started, mean_return, len(history), summary)

                if len(history) >= next_try and mean_return >= args.target:
                    # If the evaluation disagrees, train on; the next attempt waits for as many new episodes.
                    next_try = len(history) + RECENT_EPISODES
                    tries += 1
                    begin = time.perf_counter()
                    trial = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1000 * tries)
                    evaluating_s += time.perf_counter() - begin
                    # A standard error above the target, so that luck with the episodes does not end the training.
                    reached = trial.mean - trial.std / EVAL_EPISODES**0.5 >= args.target
                if checkpoint:
                    saved["progress"] = (steps, tries, next_try, reached, time.perf_counter() - started)
                    save(checkpoint, parts, saved)
        seconds = time.perf_counter() - started
        stats = collector.stats()
        # Other episodes than those that chose the moment to stop.
        evaluation = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1_000_000)

    print(f"steps       {steps}")
    print(f"seconds     {seconds:.1f}")
    print(f"steps/s     {steps / seconds:.0f} (acting and learning)")
    if stats["invalid_rows"]:
        print(f"lost rows   {stats['invalid_rows']}")
    span = f"from {evaluation.returns.min():.0f} to {evaluation.returns.max():.0f}"
    print(f"evaluation  {evaluation.mean:.1f} ({EVAL_EPISODES} greedy episodes, {span})")
    if np.isfinite(args.target):
        print(f"target      {args.target:g} {'reached' if evaluation.mean >= args.target else 'not reached'}")
    versions = stats["version"] + 1
    kl, ess = np.nanmedian([update.kl for update in updates]), np.nanmedian([update.ess for update in updates])
    print(f"versions    {versions} (median KL of one update {kl:.4f})")
    pulls = sum(pulled for *_, pulled in requests)
    print(f"pulls       {pulls} (at every update {versions}, {versions / pulls:.1f} times as many bytes)")
    print(f"bytes       {stats['weight_bytes']} of weights{' since it was resumed' if before_s else ''}")
    print(f"ESS         {ess:.3f} (median effective sample size as an update starts)")
    if args.plot:
        plot(args, history, requests)
        print(f"plot        {args.plot}")

    # Seconds of wall clock: the workers' are the mean over workers, and they do nothing while the head learns.
    spent = dict(stats["busy_s"])
    spent["waiting"] = stats["collecting_s"] - sum(spent.values())
    spent |= {"learning": learning_s, "evaluating": evaluating_s} | ({"before": before_s} if before_s else {})
    spent["other"] = seconds - sum(spent.values())
    print("\nwhere the time went")
    for name, value in spent.items():
        print(f"{name:<11} {value:7.1f} s {value / seconds:6.1%}")


def save(path: Path, parts: dict, kept: dict) -> None:
    """Write what training has come to. A process that is killed meanwhile leaves the file before."""
    kept |= {name: part.state_dict() for name, part in parts.items()} | {"rng": torch.get_rng_state()}
    torch.save(kept, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def load(path: Path, parts: dict) -> dict:
    saved = torch.load(path, weights_only=False)  # our own: it has tuples of this file
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    torch.set_rng_state(saved["rng"])
    return saved


class Update(NamedTuple):
    drift: float  # of the policy that acted from that at the start of the update: mean KL, estimated from the actions
    ess: float  # effective sample size at the start
    kl: float  # mean KL between the policies at the start and at the end


def learn(agent: Agent, optimizer: torch.optim.Optimizer, batch: ce.Rollout) -> Update:
    """One update of decoupled PPO (Hilton et al. 2021) on the valid rows of a rollout of tensors.

    The clip is centred on the policy as the update starts, whichever acted; the weights make up for the difference.
    With fresh data they are 1, and this is PPO.
    """
    batch = dataclasses.replace(batch, rewards=batch.rewards * REWARD_SCALE)
    estimate = gae(batch, agent.get_value, GAMMA, GAE_LAMBDA)
    with torch.no_grad():
        logits = agent.actor(batch.obs)
        proximal = Categorical(logits=logits, validate_args=False).log_prob(batch.actions)
    # Rows of an environment that was lost hold fillers. Select: what is masked by multiplying still counts in a mean.
    rows = batch.valid
    obs, actions, logits, logprobs = batch.obs[rows], batch.actions[rows], logits[rows], proximal[rows]
    advantages, returns = estimate.advantages[rows], estimate.returns[rows]
    weights = behaviour_weights(batch, proximal)[rows]
    # Fewer than two rows have no standard deviation; this happens when almost everything was lost.
    if len(returns) < 2:
        return Update(np.nan, np.nan, np.nan)
    log_ratio = logprobs - batch.logprobs[rows]
    drift = float((log_ratio.exp() - 1.0 - log_ratio).mean())
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    minibatches = max(1, round(len(returns) / MINIBATCH_SIZE))
    for _ in range(EPOCHS):
        for index in torch.randperm(len(returns)).chunk(minibatches):
            _, logprob, entropy, value = agent.get_action_and_value(obs[index], actions[index])
            ratio = (logprob - logprobs[index]).exp()
            gain = torch.min(ratio * advantages[index], ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages[index])
            value_error = (value.squeeze(-1) - returns[index]).square()
            loss = VALUE_COEF * value_error.mean() - (weights[index] * gain).mean() - ENTROPY_COEF * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
            optimizer.step()
    with torch.no_grad():
        kl = kl_divergence(Categorical(logits=logits), Categorical(logits=agent.actor(obs))).mean()
    return Update(drift, effective_sample_size(batch, proximal), float(kl))


class LineDisplay(contextlib.AbstractContextManager):
    """A plain line every few seconds."""

    interval_s = 3.0

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.due_s = 0.0

    def __exit__(self, *_):
        return None

    def update(self, steps: int, elapsed_s: float, mean_return: float, episodes: int, summary: dict[str, float]):
        if elapsed_s < self.due_s:
            return
        self.due_s = elapsed_s + self.interval_s
        print(
            f"{elapsed_s:6.1f} s  {steps:>8} of {self.args.total_steps} steps  "
            f"{steps / elapsed_s:6.0f} steps/s  mean return {mean_return:.1f}  episodes {episodes}  "
            f"workers {self.args.workers} ({summary['collect/steps_per_s']:.0f} steps/s)  "
            f"pulls {summary['sync/pulls']:.0f} of {summary['sync/version'] + 1:.0f}",
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

    def update(self, steps: int, elapsed_s: float, mean_return: float, episodes: int, summary: dict[str, float]):
        from rich.panel import Panel
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        if np.isfinite(mean_return):
            self.curve.append(mean_return)
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim", width=12)
        table.add_column(width=52)
        minutes, seconds = divmod(int(elapsed_s), 60)
        target = f"  [dim]target {self.args.target:g}[/]" if np.isfinite(self.args.target) else ""
        shares = "  ".join(f"{name} {summary[f'collect/share_{name}']:.0%}" for name in ("environment", "policy"))
        lost = summary["collect/invalid_rows"]
        table.add_row("progress", ProgressBar(self.args.total_steps, min(steps, self.args.total_steps), width=52))
        table.add_row("steps", f"{steps:,} of at most {self.args.total_steps:,}")
        table.add_row("steps/s", f"{steps / elapsed_s:,.0f}  [dim]collecting {summary['collect/steps_per_s']:,.0f}[/]")
        table.add_row("mean return", f"[bold]{mean_return:.1f}[/]{target}")
        table.add_row("", f"[cyan]{sparkline(self.curve, 52)}[/]")
        table.add_row("episodes", f"{episodes:,}" + (f"  [red]{lost:.0f} lost rows[/]" if lost else ""))
        table.add_row("workers", f"{self.args.workers} for {self.args.num_envs} environments")
        table.add_row("", f"[dim]{shares}  waiting {summary['collect/share_waiting']:.0%}[/]")
        pulled = f"{summary['sync/pulls']:.0f} pulls for {summary['sync/version'] + 1:.0f} versions"
        table.add_row("weights", f"{pulled}  [dim]{summary['sync/weight_bytes']:,.0f} bytes[/]")
        table.add_row("elapsed", f"{minutes}:{seconds:02d}")
        self.live.update(Panel(table, title=f"PPO on {self.args.env_id}: the workers act", expand=False))


def sparkline(curve: list[float], width: int) -> str:
    if not curve:
        return ""
    low, high = min(curve), max(curve)
    picked = [curve[i] for i in np.linspace(0, len(curve) - 1, min(width, len(curve))).astype(int)]
    return "".join("▁▂▃▄▅▆▇█"[int(7 * (value - low) / (high - low or 1.0))] for value in picked)


def plot(args: argparse.Namespace, history: list[tuple[int, float]], requests: list[tuple]) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no window: this may run on a machine without a screen
    import matplotlib.pyplot as plt

    shape = {"sharex": True, "height_ratios": (5, 3), "figsize": (8, 6.5), "layout": "constrained"}
    figure, (upper, lower) = plt.subplots(2, **shape)
    if history:
        steps, returns = np.array(history).T
        sums = np.cumsum(np.concatenate(([0.0], returns)))
        last = np.arange(1, len(returns) + 1)
        first = np.maximum(0, last - RECENT_EPISODES)
        upper.scatter(steps, returns, s=6, alpha=0.3, linewidths=0, label="episode")
        upper.plot(steps, (sums[last] - sums[first]) / (last - first), color="C1", label=f"mean of {RECENT_EPISODES}")
    if np.isfinite(args.target):
        upper.axhline(args.target, color="grey", linestyle="--", linewidth=1, label="target")
    upper.set(ylabel="episode return", title=f"PPO on {args.env_id}, seed {args.seed}")
    upper.legend(loc="lower right", markerscale=2)

    # A pull sets the drift to zero: the line falls there, and the next rollout is acted by the newest policy.
    line = [point for at, drift, pulled in requests for point in ((at, drift), (at, 0.0))[: 1 + pulled]]
    pulls = [(at, drift) for at, drift, pulled in requests if pulled]
    lower.plot(*zip(*line, strict=True), color="C0", marker=".", linewidth=1.2, label="as a rollout begins")
    style = {"linestyle": "", "marker": "v", "markersize": 7, "color": "C3", "clip_on": False, "zorder": 3}
    lower.plot(*zip(*pulls, strict=True), **style, label=f"{len(pulls)} pulls for {len(requests)} rollouts")
    if args.sync == "aps":
        style = {"color": "grey", "linestyle": "--", "linewidth": 1}
        lower.axhline(args.threshold, **style, label=f"threshold {args.threshold:g}")
    lower.set(xlabel="environment steps", ylabel="mean KL per state")
    lower.set_title("How far the newest policy is from that of the workers", fontsize="medium", loc="left")
    lower.set_ylim(0.0, 1.45 * np.nanmax([0.01, *(drift for _, drift in line)]))  # room for the legend
    lower.set_xlim(left=0)
    lower.xaxis.set_major_formatter("{x:,.0f}")
    lower.legend(loc="upper center", ncols=3)
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
