"""Environments for the tests; the workers import this module."""

import os
import signal
import sys
import time

import gymnasium
import numpy as np
from gymnasium import spaces


class Counter:
    """Observes (index, episode, step, last action); an episode ends after `length` steps."""

    observation_space = spaces.Box(-1e6, 1e6, (4,), np.float32)
    action_space = spaces.Discrete(1000)

    def __init__(self, index: int, length: int = 5):
        self.index, self.length, self.episode = index, length, -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        self.steps = 0
        return self.observe(-1), {}

    def step(self, action):
        self.steps += 1
        terminated = self.steps == self.length and self.index % 2 == 0
        truncated = self.steps == self.length and self.index % 2 == 1
        return self.observe(action), float(action), terminated, truncated, {}

    def observe(self, action):
        return np.array([self.index, self.episode, self.steps, action], np.float32)


class Picture:
    """Large observations, full of the episode's number."""

    action_space = spaces.Discrete(2)

    def __init__(self, side: int):
        self.observation_space = spaces.Box(0, 255, (side, side, 4), np.uint8)
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        self.episode += 1
        return np.full(self.observation_space.shape, self.episode, np.uint8), {}

    def step(self, action):
        return np.full(self.observation_space.shape, self.episode, np.uint8), 0.0, False, False, {}


# What a Misbehaving environment does when told so by its action.
RAISE, EXIT, DIE, SEGFAULT, HANG, BAD_SHAPE, BAD_DTYPE, NO_REWARD, TWO_VALUES = range(1, 10)


class Misbehaving(Counter):
    """Does as its action says; 0 is an ordinary step."""

    def step(self, action):
        if action == RAISE:
            raise ValueError("the lander has crashed")
        if action == EXIT:
            sys.exit("enough")
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == SEGFAULT:
            os.kill(os.getpid(), signal.SIGSEGV)
        if action == HANG:
            time.sleep(600)
        result = super().step(action)
        if action == BAD_SHAPE:
            return np.zeros((1,), np.float32), *result[1:]
        if action == BAD_DTYPE:
            return np.zeros((4,), np.complex64), *result[1:]
        if action == NO_REWARD:
            return result[0], None, *result[2:]
        if action == TWO_VALUES:
            return result[:2]
        return result


class RaisesInReset(Counter):
    def reset(self, *, seed=None, options=None):
        if self.index == 2:
            raise RuntimeError("no level file")
        return super().reset(seed=seed, options=options)


class RaisesWhenMade(Counter):
    def __init__(self, index: int):
        if index == 3:
            raise FileNotFoundError("no ROM")
        super().__init__(index)


class HangsWhenMade(Counter):
    def __init__(self, index: int):
        if index == 3:
            time.sleep(600)
        super().__init__(index)


class Forks(Counter):
    """Forks in `create_env`, `reset` or `step`, and both processes return from there, or in `step`,
    and the child raises SystemExit there ("exit")."""

    def __init__(self, where: str, index: int):
        self.where = where
        self.fork("create_env")
        super().__init__(index)

    def fork(self, here: str) -> None:
        if self.where == here:
            if os.fork() > 0:
                os.wait()  # The child is first, so that what it does is seen.
            elif here == "exit":
                sys.exit()

    def reset(self, *, seed=None, options=None):
        self.fork("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action):
        self.fork("step")
        self.fork("exit")
        return super().step(action)


class DiesWhenMade(Counter):
    def __init__(self, index: int):
        os.kill(os.getpid(), signal.SIGKILL)


class Different(Counter):
    """Environment 1 has another space than the others."""

    def __init__(self, index: int):
        super().__init__(index)
        self.observation_space = spaces.Box(-1e6, 1e6, (4 + index // 2,), np.float32)


class NoSpaces:
    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, 0.0, False, False, {}


class NoReset:
    def step(self, action):
        return 0, 0.0, False, False, {}


class InfoOf(Counter):
    """Returns this info from `step`, in Gymnasium's five results or the old Gym's four."""

    def __init__(self, info, results):
        super().__init__(0)
        self.info, self.results = info, results

    def step(self, action):
        observation, reward, terminated, truncated, _ = super().step(action)
        ended = (terminated, truncated) if self.results == 5 else (terminated,)
        return observation, reward, *ended, self.info


class Textual(NoSpaces):
    observation_space = spaces.Dict({"mission": spaces.Text(10), "x": spaces.Discrete(2)})
    action_space = spaces.Discrete(2)


class NameClash(NoSpaces):
    observation_space = spaces.Dict({"reward": spaces.Discrete(2), "x": spaces.Discrete(2)})
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return {"reward": 0, "x": 0}, {}


class Echo(Counter):
    """Puts what it got into nested, strided observations."""

    observation_space = spaces.Dict(
        {
            "transposed": spaces.Box(0, 255, (3, 4), np.uint8),
            "inner": spaces.Dict({"discrete": spaces.Discrete(10), "flag": spaces.MultiBinary(3)}),
            "pair": spaces.Tuple((spaces.MultiDiscrete([3, 4]), spaces.Box(-1, 1, (2,)))),
        }
    )
    action_space = spaces.Dict(
        {
            "button": spaces.Discrete(5, start=2),
            "stick": spaces.Box(-1, 1, (2,), np.float32),
            "keys": spaces.MultiBinary(3),
            "menu": spaces.Tuple((spaces.MultiDiscrete([3, 4]),)),
        }
    )

    def observe(self, action):
        base = np.arange(24, dtype=np.uint8).reshape(4, 6) + np.uint8(self.index)
        if action == -1:
            button, stick, pressed, menu = 0, np.zeros(2), np.zeros(3), np.zeros(2, np.int64)
        else:
            assert type(action["button"]) is int
            assert self.action_space.contains(action | {"button": np.int64(action["button"])})
            button, stick = action["button"], action["stick"]
            pressed, menu = action["keys"], action["menu"][0]
        return {
            "transposed": base[:, ::2].T,
            "inner": {"discrete": button, "flag": np.flip(pressed).astype(np.int8)},
            "pair": (menu, stick[::-1].astype(np.float64)),
        }

    def step(self, action):
        self.steps += 1
        return self.observe(action), 0.0, False, False, {}


class Large(Counter):
    """Frames of raw Atari size; 64 of them in two batches made moolib hang."""

    observation_space = spaces.Box(0, 255, (210, 160, 3), np.uint8)
    action_space = spaces.Discrete(256)

    def observe(self, action):
        return np.full((210, 160, 3), max(action, 0), np.uint8)


class Random(Counter):
    """Observes numbers from its own generator, which the seed of its first reset determines."""

    observation_space = spaces.Box(0, 1, (2,), np.float64)

    def reset(self, *, seed=None, options=None):
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        return super().reset(seed=seed, options=options)

    def observe(self, action):
        return self.random.random(2)


class Recorder(Counter):
    """Writes down that it was closed."""

    def __init__(self, folder: str, index: int):
        super().__init__(index)
        self.folder = folder

    def close(self):
        with open(os.path.join(self.folder, f"closed-{self.index}"), "w"):
            pass


def counter_without_index():
    return Counter(0)


def needs_two(width, height):
    return Counter(0)


class Alarmed(Counter):
    """Gets a signal with a handler whenever its process has waited for a hundredth of a second."""

    def __init__(self, index: int):
        super().__init__(index)
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)


class Bare:
    """Declares nothing; shows its last action."""

    def reset(self, *, seed=None, options=None):
        return {"image": np.zeros((2, 3), np.uint8)}, {}

    def step(self, action):
        return {"image": np.full((2, 3), action, np.uint8)}, 0.0, False, False, {}


class OldGym:
    """Steps give three values for action 3, else four; 5 ends by a time limit."""

    observation_space = spaces.Box(-1e6, 1e6, (1,), np.float32)
    action_space = spaces.Discrete(10)

    def reset(self):
        return np.zeros(1, np.float32)

    def step(self, action):
        observation = np.full(1, action, np.float32)
        if action == 3:
            return observation, 3.0, False
        return observation, 1.0, True, {"TimeLimit.truncated": action == 5}


class Informed(Counter):
    """Tells its episode and last action in infos."""

    def reset(self, *, seed=None, options=None):
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"episode": self.episode}

    def step(self, action):
        if action == 99:
            time.sleep(1.0)
        return *super().step(action)[:4], {"action": int(action)}


class Typed(gymnasium.Env):
    """Its info has the type of a Discrete action of int8: the action, or the first of its parts.

    Each step ends an episode.
    """

    observation_space = spaces.Discrete(3)

    def __init__(self, space):
        number = spaces.Discrete(3, dtype=np.int8)
        self.action_space = number if space == "number" else spaces.Tuple((number, number))

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        number = action[0] if isinstance(action, tuple) else action
        return 1, 0.0, True, False, {"type": type(number).__name__}


class Remembering(Counter):
    """Observes (index, seed, option "x", last action); dies once in what it is told to die in.

    `folder` outlives the worker: the file "told" holds the method's name, and goes with the death.
    """

    def __init__(self, folder: str, index: int):
        super().__init__(index, length=1000)
        self.told = os.path.join(folder, "told")
        self.seed = self.option = -1

    def die_if_told(self, method):
        if self.index == 1 and os.path.exists(self.told):
            with open(self.told) as file:
                told = file.read()
            if told == method:
                os.remove(self.told)
                os.kill(os.getpid(), signal.SIGKILL)

    def reset(self, *, seed=None, options=None):
        self.die_if_told("reset")
        if seed is not None:
            self.seed = seed
        self.option = (options or {}).get("x", -1)
        observation, _ = super().reset(seed=seed, options=options)
        return observation, {"seed": self.seed}

    def step(self, action):
        self.die_if_told("step")
        return super().step(action)

    def plus(self, number):
        self.die_if_told("plus")
        return self.index + number

    def observe(self, action):
        return np.array([self.index, self.seed, self.option, action], np.float32)


class Shapeshifter(Counter):
    """Observes a matrix of its action, in as many ways as there are to hold one in memory."""

    observation_space = spaces.Box(-1e6, 1e6, (2, 3), np.float32)

    def reset(self, *, seed=None, options=None):
        return np.zeros((2, 3), np.float32), {}

    def step(self, action):
        plain = np.arange(6, dtype=np.float32).reshape(2, 3) + action
        shapes = [
            plain,
            np.asfortranarray(plain),
            np.repeat(plain, 2, axis=1)[:, ::2],
            plain.astype(">f4"),
            plain.astype(np.float64),
            plain.tolist(),
            plain.view(np.recarray),
            np.broadcast_to(plain[:1], (2, 3)),
        ]
        rewards = [float, int, np.float32, np.float64, np.int16, np.array, bool, float]
        flag = [False, 0, np.bool_(False), np.array(False)][action % 4]
        return shapes[action], rewards[action](action), flag, flag, {}


class Flagging(Informed):
    """Environment 2 writes a file when it is reset."""

    def __init__(self, folder: str, index: int):
        super().__init__(index)
        self.folder = folder

    def reset(self, *, seed=None, options=None):
        if self.index == 2:
            with open(os.path.join(self.folder, "reached"), "w"):
                pass
        return super().reset(seed=seed, options=options)


class Written(Remembering):
    """Observes its last action; both are texts, which come in messages."""

    observation_space = action_space = spaces.Text(10, min_length=0)

    def step(self, action):
        self.die_if_told("step")
        return action, 0.0, False, False, {}

    def observe(self, action):
        return ""


class Long:
    """Observes its last action, a text of at most `length` letters."""

    def __init__(self, length: int):
        self.observation_space = self.action_space = spaces.Text(length, min_length=0)

    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, action):
        return action, 0.0, False, False, {}
