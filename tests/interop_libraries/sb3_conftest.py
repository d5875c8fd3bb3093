"""Runs SB3's own tests with moolink.sb3.VecEnv as SubprocVecEnv; a conftest.py beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import stable_baselines3.common.vec_env

import moolink
import moolink.sb3


class SubprocVecEnv(moolink.sb3.VecEnv):
    """Takes the arguments of SB3's."""

    def __init__(self, env_fns: list[Callable[[], Any]], start_method: str | None = None) -> None:
        super().__init__(moolink.VectorEnv(env_fns, context=start_method))


# Before the tests import it.
stable_baselines3.common.vec_env.SubprocVecEnv = SubprocVecEnv
