"""Train PPO from images, where the workers act: a small game with uint8 frames, and a small convolutional network.

    python examples/ppo_pixels.py

The agent has the shape of CleanRL's `ppo_atari.py` (`network`, `actor`, frames divided by 255), which a collector
recognises. Frames stay uint8 from the environment to the learner: a quarter of the memory of floats.

A random policy returns -0.66. On two cores, seeds 1 to 5 ended with evaluations from 0.97 to 1.00, after 25 to 45
seconds and 200 to 375 thousand steps.
"""

import argparse
import time

import gymnasium as gym
import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical

import clusterenv as ce
from clusterenv.learning import gae

NUM_STEPS = 76  # four episodes
EPOCHS = 3
MINIBATCH_SIZE = 304
LEARNING_RATE = 2e-3
GAMMA = 0.999
GAE_LAMBDA = 0.98
CLIP = 0.2
ENTROPY_COEF = 0.003
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5
EVAL_EPISODES = 200
RECENT_EPISODES = 100  # over as many `collector.summary()` takes its means


class Catch(gym.Env):
    """A ball falls and bounces off the walls; a paddle must be under it in the end. +1 if it is, else -1.

    The image is [2, 20, 20]: this frame and the one before, since one alone does not tell where the ball is going.
    """

    size = 20
    observation_space = gym.spaces.Box(0, 255, (2, size, size), np.uint8)
    action_space = gym.spaces.Discrete(3)  # left, stay, right

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.row, self.column = 0, int(self.np_random.integers(self.size))
        self.drift = int(self.np_random.integers(-1, 2))
        self.paddle = int(self.np_random.integers(1, self.size - 1))  # its middle; it is three wide
        self.frame = self.draw()
        return np.stack([self.frame, self.frame]), {}

    def step(self, action):
        self.paddle = min(max(self.paddle + int(action) - 1, 1), self.size - 2)
        if not 0 <= self.column + self.drift < self.size:
            self.drift = -self.drift
        self.row, self.column = self.row + 1, self.column + self.drift
        before, self.frame = self.frame, self.draw()
        landed = self.row == self.size - 1
        caught = abs(self.column - self.paddle) <= 1
        return np.stack([self.frame, before]), (1.0 if caught else -1.0) if landed else 0.0, landed, False, {}

    def draw(self):
        frame = np.zeros((self.size, self.size), dtype=np.uint8)
        frame[-1, self.paddle - 1 : self.paddle + 2] = 128
        frame[self.row, self.column] = 255
        return frame


def layer(module: nn.Module, gain: float = 2**0.5) -> nn.Module:
    nn.init.orthogonal_(module.weight, gain)
    nn.init.zeros_(module.bias)
    return module


class Agent(nn.Module):
    def __init__(self, num_actions: int):
        super().__init__()
        self.network = nn.Sequential(
            layer(nn.Conv2d(2, 16, 4, stride=2)),  # [16, 9, 9]
            nn.ReLU(),
            layer(nn.Conv2d(16, 32, 3, stride=2)),  # [32, 4, 4]
            nn.ReLU(),
            nn.Flatten(),
            layer(nn.Linear(32 * 4 * 4, 128)),
            nn.ReLU(),
        )
        self.actor = layer(nn.Linear(128, num_actions), gain=0.01)
        self.critic = layer(nn.Linear(128, 1), gain=1.0)

    def get_value(self, obs):
        return self.critic(self.network(obs / 255.0))

    def get_action_and_value(self, obs, action=None):
        hidden = self.network(obs / 255.0)
        policy = Categorical(logits=self.actor(hidden), validate_args=False)
        if action is None:
            action = policy.sample()
        return action, policy.log_prob(action), policy.entropy(), self.critic(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description="PPO from images; the workers act")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--workers", type=int, help="default: one per core; 0 acts and steps in this process")
    parser.add_argument("--total-steps", type=int, default=600_000, help="give up after so many transitions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.95)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # the other cores are the workers'
    envs = ce.ClusterEnv(Catch, num_envs=args.num_envs, backend=ce.Local(workers=args.workers))
    agent = Agent(3)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    collector = envs.collector(agent, seed=args.seed)
    random = envs.collector(ce.RandomPolicy(), seed=args.seed).evaluate(episodes=EVAL_EPISODES, deterministic=False)

    steps = tries = 0
    next_try, next_line = RECENT_EPISODES, 0.0
    reached = False
    started = time.perf_counter()
    while steps < args.total_steps and not reached:
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1.0 - steps / args.total_steps)
        batch = collector.rollout(NUM_STEPS).torch()
        steps += int(batch.valid.sum())

        estimate = gae(batch, agent.get_value, GAMMA, GAE_LAMBDA)
        rows = batch.valid
        obs, actions, logprobs = batch.obs[rows], batch.actions[rows], batch.logprobs[rows]
        advantages, returns = estimate.advantages[rows], estimate.returns[rows]
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        for _ in range(EPOCHS):
            for index in torch.randperm(len(returns)).split(MINIBATCH_SIZE):
                _, logprob, entropy, value = agent.get_action_and_value(obs[index], actions[index])
                ratio = (logprob - logprobs[index]).exp()
                gain = torch.min(ratio * advantages[index], ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages[index])
                value_error = (value.squeeze(-1) - returns[index]).square()
                loss = VALUE_COEF * value_error.mean() - gain.mean() - ENTROPY_COEF * entropy.mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()

        summary = collector.summary()
        mean_return = summary["charts/episodic_return"]
        if (elapsed_s := time.perf_counter() - started) >= next_line:
            next_line = elapsed_s + 3.0
            print(f"{elapsed_s:6.1f} s  {steps:>8} steps  mean return {mean_return:.2f}", flush=True)
        if summary["collect/episodes"] >= next_try and mean_return >= args.target:
            next_try = summary["collect/episodes"] + RECENT_EPISODES
            tries += 1
            trial = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1000 * tries)
            # A standard error above the target, so that luck with the episodes does not end the training.
            reached = trial.mean - trial.std / EVAL_EPISODES**0.5 >= args.target
    seconds = time.perf_counter() - started
    # Other episodes than those that chose the moment to stop.
    evaluation = collector.evaluate(episodes=EVAL_EPISODES, seed=args.seed + 1_000_000)
    envs.close()

    print(f"steps       {steps}")
    print(f"seconds     {seconds:.1f}")
    print(f"random      {random.mean:.2f} ({EVAL_EPISODES} episodes)")
    print(f"evaluation  {evaluation.mean:.2f} ({EVAL_EPISODES} greedy episodes)")
    print(f"target      {args.target:g} {'reached' if evaluation.mean >= args.target else 'not reached'}")


if __name__ == "__main__":
    main()
