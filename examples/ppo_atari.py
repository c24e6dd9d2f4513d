"""Train PPO on an Atari game, with ale-py's vector environment in every worker and the Nature network.

    python examples/ppo_atari.py --game Pong --plot runs/pong.png

Frames are preprocessed in C++ (84 x 84, grey, four frames) and stay uint8 from the emulator to the learner. With a GPU
the learner uses it, and `--act head` runs the policy there too; `--act auto` measures which place is faster.
`--network small` has a third of the arithmetic, for machines without a GPU.
"""

import argparse
import json
import time
from pathlib import Path

import ale_py
import gymnasium as gym
import torch
from torch import nn
from torch.distributions import Categorical

import clusterenv as ce
from clusterenv.learning import gae

GAMMA = 0.99
GAE_LAMBDA = 0.95
CLIP = 0.1
ENTROPY_COEF = 0.01
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


NETWORKS = {  # (convolutions: channels out, size, stride; features after them; hidden units)
    "nature": ([(32, 8, 4), (64, 4, 2), (64, 3, 1)], 64 * 7 * 7, 512),  # Mnih et al., 2015
    "small": ([(16, 8, 4), (32, 4, 2)], 32 * 9 * 9, 256),  # Mnih et al., 2013
}


class Agent(nn.Module):
    """The agent of CleanRL's ppo_atari.py, with a choice of networks."""

    def __init__(self, num_actions: int, network: str = "nature"):
        super().__init__()
        convolutions, features, hidden = NETWORKS[network]
        layers, channels = [], 4
        for out, size, stride in convolutions:
            layers += [layer(nn.Conv2d(channels, out, size, stride=stride)), nn.ReLU()]
            channels = out
        self.network = nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear(features, hidden)), nn.ReLU())
        self.actor = layer(nn.Linear(hidden, num_actions), gain=0.01)
        self.critic = layer(nn.Linear(hidden, 1), gain=1.0)

    def get_value(self, obs):
        return self.critic(self.network(obs / 255.0))

    def get_action_and_value(self, obs, action=None):
        hidden = self.network(obs / 255.0)
        policy = Categorical(logits=self.actor(hidden), validate_args=False)
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO on an Atari game")
    parser.add_argument("--game", default="Pong", help="as in ALE/<game>-v5")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=128)
    parser.add_argument("--workers", type=int, help="default: one per core")
    parser.add_argument("--act", choices=["workers", "head", "auto"], default="workers")
    parser.add_argument("--prefetch", type=int, choices=[0, 1], default=0, help="collect while the learner works")
    parser.add_argument("--total-steps", type=int, default=10_000_000, help="end after so many transitions")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end after this time")
    parser.add_argument("--target", type=float, default=float("inf"), help="end at this mean return of 100 episodes")
    parser.add_argument("--learning-rate", type=float, default=2.5e-4)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--minibatches", type=int, default=4)
    parser.add_argument("--eval-episodes", type=int, default=10)
    parser.add_argument("--network", choices=NETWORKS, default="nature")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path, help="draw the learning curve")
    parser.add_argument("--json", type=Path, help="write the results and the learning curve")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gym.register_envs(ale_py)
    envs = ce.ClusterEnv(
        f"ALE/{args.game}-v5",
        num_envs=args.num_envs,
        simulator="vector_entry_point",
        env_kwargs={"repeat_action_probability": 0.0},
        backend=ce.Local(workers=args.workers),
    )
    agent = Agent(int(envs.single_action_space.n), args.network).to(device)
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)
    collector = envs.collector(agent, seed=args.seed, act=args.act, prefetch=bool(args.prefetch))

    curve = []
    steps, next_line, mean_return = 0, 0.0, float("nan")
    started = time.perf_counter()
    progress = 0.0
    while progress < 1.0 and not mean_return >= args.target:
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - progress)
        batch = collector.rollout(args.num_steps, copy=False).torch(device)
        steps += int(batch.valid.sum())

        def values_of(obs):  # in parts: a rollout of images as floats is large
            with torch.no_grad():
                return torch.cat([agent.get_value(part.float()).squeeze(-1) for part in obs.split(4096)])

        estimate = gae(batch, values_of, GAMMA, GAE_LAMBDA)
        rows = batch.valid
        obs, actions, logprobs = batch.obs[rows], batch.actions[rows], batch.logprobs[rows]
        advantages, returns = estimate.advantages[rows], estimate.returns[rows]
        for _ in range(args.epochs):
            for index in torch.randperm(len(returns), device=device).chunk(args.minibatches):
                _, logprob, entropy, value = agent.get_action_and_value(obs[index].float(), actions[index])
                ratio = (logprob - logprobs[index]).exp()
                scaled = advantages[index]
                scaled = (scaled - scaled.mean()) / (scaled.std() + 1e-8)
                gain = torch.min(ratio * scaled, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * scaled)
                value_error = (value.squeeze(-1) - returns[index]).square()
                loss = VALUE_COEF * 0.5 * value_error.mean() - gain.mean() - ENTROPY_COEF * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()

        seconds = time.perf_counter() - started
        progress = max(steps / args.total_steps, seconds / args.seconds)
        mean_return = collector.summary()["charts/episodic_return"]
        curve.append((seconds, steps, mean_return))
        if seconds >= next_line:
            next_line = seconds + 5.0
            print(f"{seconds:6.1f} s  {steps:>9} steps  mean return {mean_return:.1f}", flush=True)
    seconds = time.perf_counter() - started
    stats = collector.stats()
    evaluation = collector.evaluate(episodes=args.eval_episodes, deterministic=False, seed=args.seed + 1_000_000)
    envs.close()

    print(f"steps       {steps}")
    print(f"seconds     {seconds:.1f}")
    print(f"acted       {stats['acts']['place']} ({stats['acts']['reason']}), {stats['policy']['runtime']}")
    print(f"return      {mean_return:.1f} (last 100 episodes of training)")
    print(f"evaluation  {evaluation.mean:.1f} ({args.eval_episodes} episodes)")
    if args.plot is not None:
        draw(curve, args.game, args.plot)
    if args.json is not None:
        args.json.write_text(
            json.dumps(
                {
                    "game": args.game,
                    "seed": args.seed,
                    "device": torch.cuda.get_device_name() if device.type == "cuda" else "no GPU",
                    "steps": steps,
                    "seconds": seconds,
                    "return": mean_return,
                    "acted": stats["acts"]["place"],
                    "evaluation": evaluation.returns.tolist(),
                    "curve": [point for point in curve if point[2] == point[2]],  # seconds, steps, mean return
                }
            )
        )


def draw(curve, game, path):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    axes.plot([seconds / 60 for seconds, _, _ in curve], [mean for _, _, mean in curve])
    axes.set(xlabel="minutes", ylabel="mean return of the last 100 episodes", title=game)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
