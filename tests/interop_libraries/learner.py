"""A small learner for any vector environment: one-step actor-critic, batches by a Batcher."""

from __future__ import annotations

import numpy as np
import torch

import moolink


def as_torch(array) -> torch.Tensor:
    return torch.as_tensor(array).flatten(1).float()


def train(envs: moolink.Driven, updates: int, batch_size: int = 64) -> float:
    """Trains a policy of discrete actions for some updates; returns the last loss."""
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the environments need the other cores
    features = int(np.prod(envs.single_observation_space.shape))
    actions = int(envs.single_action_space.n)
    net = torch.nn.Sequential(
        torch.nn.Linear(features, 32), torch.nn.Tanh(), torch.nn.Linear(32, actions + 1)
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    batches = moolink.Batcher(batch_size)
    before = torch.zeros(envs.num_envs, features)
    taken = torch.zeros(envs.num_envs, dtype=torch.int64)
    acted = torch.zeros(envs.num_envs, dtype=torch.bool)
    done = 0
    envs.async_reset()
    while done < updates:
        observations, rewards, terminated, truncated, infos = envs.recv()
        rows = torch.as_tensor(infos["env_id"]).long()
        after = as_torch(observations)
        batches.cat(
            {
                "before": before[rows],
                "after": after,
                "action": taken[rows],
                "weight": acted[rows],
                "reward": torch.as_tensor(rewards).float(),
                "over": torch.as_tensor(terminated) | torch.as_tensor(truncated),
            }
        )
        with torch.no_grad():
            logits = net(after)[:, :-1]
            taken[rows] = torch.distributions.Categorical(logits=logits).sample()
        before[rows] = after
        acted[rows] = torch.as_tensor(infos.get("mask", np.ones(len(rows), np.bool_)))
        while not batches.empty() and done < updates:
            loss = loss_of(net, batches.get())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
        envs.send(taken[rows], infos["env_id"])
    return loss.item()


def loss_of(net, batch) -> torch.Tensor:
    now, later = net(batch["before"]), net(batch["after"])
    target = batch["reward"] + 0.99 * later[:, -1].detach() * ~batch["over"]
    advantage = target - now[:, -1]
    chosen = now[:, :-1].log_softmax(1).gather(1, batch["action"][:, None])[:, 0]
    losses = advantage.square() - advantage.detach() * chosen
    return (losses * batch["weight"]).mean()
