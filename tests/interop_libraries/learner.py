"""A small learner for any vector environment: REINFORCE on ended episodes, batched by a Batcher."""

from __future__ import annotations

import numpy as np
import torch

import moolink


def train(envs: moolink.env_pool.Driven, updates: int, batch_size: int = 512) -> float:
    """Trains a policy of discrete actions for `updates` updates of `batch_size` steps.

    Returns the mean return of the episodes that ended during the last fifth of the updates.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the environments need the other cores
    features = int(np.prod(envs.single_observation_space.shape))
    actions = int(envs.single_action_space.n)
    net = torch.nn.Sequential(
        torch.nn.Linear(features, 32), torch.nn.Tanh(), torch.nn.Linear(32, actions)
    )
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    batches = moolink.Batcher(batch_size)
    episodes: list[list] = [[] for _ in range(envs.num_envs)]  # the steps of each row's episode
    late: list[float] = []  # returns of the last episodes
    done = 0
    envs.async_reset()
    while done < updates:
        observations, rewards, terminated, truncated, infos = envs.recv()
        over = np.logical_or(terminated, truncated)
        alive = infos.get("mask", np.ones(len(over), np.bool_))
        seen = torch.as_tensor(observations).flatten(1).float().clone()
        with torch.no_grad():
            taken = torch.distributions.Categorical(logits=net(seen)).sample()
        for i, row in enumerate(infos["env_id"]):
            episode = episodes[row]
            if episode:
                episode[-1]["reward"] = float(rewards[i])
            if over[i] and episode:
                batches.cat(of_episode(episode))
                if done >= updates - updates // 5:
                    late.append(sum(step["reward"] for step in episode))
                episode.clear()
            if alive[i]:
                episode.append({"observation": seen[i], "action": taken[i]})
        while not batches.empty() and done < updates:
            batch = batches.get()
            worth = batch["worth"]
            log_pi = net(batch["observation"]).log_softmax(1)
            chosen = log_pi.gather(1, batch["action"][:, None])[:, 0]
            loss = -(chosen * (worth - worth.mean()) / (worth.std() + 1e-6)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
        envs.send(taken, infos["env_id"])
    return float(np.mean(late))


def of_episode(steps: list[dict]) -> dict[str, torch.Tensor]:
    """Stacks the steps of an episode, with the discounted return from each step on."""
    worth, worths = 0.0, []
    for step in reversed(steps):
        worth = step["reward"] + 0.99 * worth
        worths.append(worth)
    return {
        "observation": torch.stack([step["observation"] for step in steps]),
        "action": torch.stack([step["action"] for step in steps]),
        "worth": torch.tensor(worths[::-1]),
    }
