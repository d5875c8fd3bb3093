"""Cart-poles simulated together on one device, with the interface of Isaac Lab's environments."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

GRAVITY = 9.8  # m/s^2
CART, POLE, HALF_LENGTH = 1.0, 0.1, 0.5  # kg, kg, m
FORCE = 10.0  # N, of action 1
TAU = 0.02  # s between two states
MAX_X, MAX_THETA = 2.4, 12 * 2 * torch.pi / 360  # m, rad: beyond one of them an episode ends
SPREAD = 0.05  # each number of a first state lies within +- SPREAD


class CartPole:
    """A force pushes a cart left and right to keep a pole upright. All operations are torch's, run
    on the environments' device, and never make the host wait for it.

    The equations and their Euler steps are those of Gymnasium's CartPole-v1: equations 23 and 24 of
    Florian, "Correct equations for the dynamics of the cart-pole system" (2007), without friction.
    The force is continuous, however. Each step's reward is 1.

    As in Isaac Lab, an environment whose episode ends is reset in the same step: the observation is
    the first of the next episode, and `step` does not return the last one.

    Args:
        num_envs: E, the number of cart-poles.
        device: of all tensors.
        max_steps: an episode is truncated after this many.
    """

    def __init__(
        self, num_envs: int, device: torch.device | str = "cpu", max_steps: int = 500
    ) -> None:
        self.num_envs, self.device, self.max_steps = num_envs, torch.device(device), max_steps
        policy = spaces.Box(-np.inf, np.inf, (4,))
        self.single_observation_space = spaces.Dict({"policy": policy})
        self.single_action_space = spaces.Box(-1, 1, (1,))

    def reset(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The first observations: ``policy``, float32 [E, 4], is x, its rate, theta, its rate."""
        self._state = self._first()
        self._steps = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        return {"policy": self._state}, {}

    def step(
        self, actions: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor, dict[str, Any]]:
        """Pushes each cart with FORCE x its action, float32 [E, 1], clipped to -1 ... 1.

        Returns:
            observations, rewards (float32 [E]), terminated, truncated (bool [E]), extras.
        """
        state = moved(self._state, FORCE * actions[:, 0].clamp(-1, 1))
        self._steps = self._steps + 1
        terminated = (state[:, 0].abs() > MAX_X) | (state[:, 2].abs() > MAX_THETA)
        truncated = (self._steps >= self.max_steps) & ~terminated
        over = terminated | truncated
        self._state = torch.where(over[:, None], self._first(), state)
        self._steps = self._steps.masked_fill(over, 0)
        rewards = torch.ones(self.num_envs, device=self.device)
        return {"policy": self._state}, rewards, terminated, truncated, {}

    def close(self) -> None:
        """Does nothing: there is nothing to close."""

    def _first(self) -> Tensor:
        return torch.empty(self.num_envs, 4, device=self.device).uniform_(-SPREAD, SPREAD)


def moved(state: Tensor, force: Tensor) -> Tensor:
    """Returns the states [E, 4] after TAU seconds of these forces [E]."""
    _, x_dot, theta, theta_dot = state.unbind(-1)
    sin, cos, mass = theta.sin(), theta.cos(), CART + POLE
    push = (force + POLE * HALF_LENGTH * theta_dot.square() * sin) / mass
    inertia = HALF_LENGTH * (4 / 3 - POLE * cos.square() / mass)
    theta_acc = (GRAVITY * sin - cos * push) / inertia
    x_acc = push - POLE * HALF_LENGTH * theta_acc * cos / mass
    rates = torch.stack([x_dot, x_acc, theta_dot, theta_acc], -1)
    return state + TAU * rates
