"""Stable-Baselines3's PPO solves CartPole through moolink's VectorEnv."""

import functools

import gymnasium
import pytest

import moolink

pytest.importorskip("stable_baselines3", reason="needs stable-baselines3: make test-interop")

from stable_baselines3 import PPO
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import VecMonitor

from moolink.sb3 import VecEnv

make = functools.partial(gymnasium.make, "CartPole-v1")


@pytest.mark.timeout(1200)
def test_ppo_reaches_475_on_cartpole():
    envs = VecMonitor(VecEnv(moolink.VectorEnv(make, 8, num_workers=2)))
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=32,
        batch_size=256,
        gae_lambda=0.8,
        gamma=0.98,
        n_epochs=20,
        learning_rate=lambda left: 1e-3 * left,
        clip_range=lambda left: 0.2 * left,
        seed=0,
        device="cpu",
    )
    model.learn(100_000)
    mean, _ = evaluate_policy(model, envs, n_eval_episodes=40)
    assert mean >= 475
    envs.close()
