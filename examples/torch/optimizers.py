"""Adam and RMSProp.

They compute what `torch.optim`'s do. Those import torch's compiler when the first one is made: a
second and 70 MB in every peer before it has learned anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from examples.common.config import LearnerConfig


class Optimizer(Protocol):
    """Steps a list of parameters by their gradients."""

    def step(self, learning_rate: float) -> None:
        """Changes the parameters in place. A missing gradient counts as zero."""

    def state(self) -> dict[str, object]:
        """The tensors, by reference, and numbers that the next step depends on."""

    def load_state(self, state: dict[str, object]) -> None:
        """Takes over what `state` gave, by value."""


class Adam:
    """Adam with the usual corrections of the means' bias (arXiv 1412.6980, algorithm 1)."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], betas: tuple[float, float], eps: float
    ) -> None:
        self._parameters = list(parameters)
        self._betas = betas
        self._eps = eps
        self._mean = [torch.zeros_like(p) for p in self._parameters]
        self._mean_of_squares = [torch.zeros_like(p) for p in self._parameters]
        self._count = 0

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._count += 1
        beta_1, beta_2 = self._betas
        correction_1 = 1 - beta_1**self._count
        root_2 = (1 - beta_2**self._count) ** 0.5
        grads = _gradients(self._parameters)
        torch._foreach_lerp_(self._mean, grads, 1 - beta_1)
        torch._foreach_mul_(self._mean_of_squares, beta_2)
        torch._foreach_addcmul_(self._mean_of_squares, grads, grads, 1 - beta_2)
        # m / c1 / (sqrt(v) / r2 + eps), with one pass less.
        divisors = torch._foreach_sqrt(self._mean_of_squares)
        torch._foreach_add_(divisors, self._eps * root_2)
        scale = -learning_rate * root_2 / correction_1
        torch._foreach_addcdiv_(self._parameters, self._mean, divisors, scale)

    def state(self) -> dict[str, object]:
        return {"count": self._count, "mean": self._mean, "mean_of_squares": self._mean_of_squares}

    def load_state(self, state: dict[str, object]) -> None:
        self._count = state["count"]
        _copy(self._mean, state["mean"])
        _copy(self._mean_of_squares, state["mean_of_squares"])


class RMSProp:
    """RMSProp without momentum: the gradient over the root of its mean square, plus epsilon."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float, eps: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self._eps = eps
        self._mean_of_squares = [torch.zeros_like(p) for p in self._parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        grads = _gradients(self._parameters)
        torch._foreach_mul_(self._mean_of_squares, self._decay)
        torch._foreach_addcmul_(self._mean_of_squares, grads, grads, 1 - self._decay)
        divisors = torch._foreach_sqrt(self._mean_of_squares)
        torch._foreach_add_(divisors, self._eps)
        torch._foreach_addcdiv_(self._parameters, grads, divisors, -learning_rate)

    def state(self) -> dict[str, object]:
        return {"mean_of_squares": self._mean_of_squares}

    def load_state(self, state: dict[str, object]) -> None:
        _copy(self._mean_of_squares, state["mean_of_squares"])


def make_optimizer(parameters: Iterable[nn.Parameter], config: LearnerConfig) -> Optimizer:
    """The configured optimiser."""
    if config.optimizer == "adam":
        return Adam(parameters, (0.9, 0.999), config.adam_eps)
    return RMSProp(parameters, config.rmsprop_decay, config.rmsprop_eps)


def _gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


def _copy(to: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for tensor, value in zip(to, values, strict=True):
        tensor.copy_(torch.as_tensor(value))
