"""Observations of several kinds, agents that act in turn, masks of actions."""

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from examples.common.agents import ParallelEnvs
from examples.common.environments import Environments, make_envs, random_means
from examples.common.observations import MASK, Parts
from examples.common.options import ImpalaOptions, OptionError, PpoOptions, defaults

CHOICES = 5
HERE = "tests.learning.test_observations"


def make(env_id, num_envs, **given):
    o = defaults(ImpalaOptions, {}, env_id=env_id, num_peers=1)
    for name, value in given.items():
        setattr(o, name, value)
    return make_envs(o, num_envs)


def at_random(envs, random):
    return random.integers(envs.actions.choices, size=(envs.num_envs, envs.actions.size))


class Mission(gymnasium.Env):
    """Observes a text, a sequence, and what a network takes."""

    def __init__(self, only_text=False):
        text = spaces.Text(8)
        parts = {"mission": text, "seen": spaces.Sequence(spaces.Discrete(2))}
        parts["where"] = spaces.Tuple((spaces.Discrete(3), spaces.Box(0, 1, (2,))))
        self.observation_space = text if only_text else spaces.Dict(parts)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"mission": "go", "seen": (0, 1), "where": (2, np.array([0.25, 0.75]))}, {}

    def step(self, action):
        return self.reset()[0], 1.0, False, False, {}


class Masked(gymnasium.Env):
    """Two actions of five are legal; which, changes with each step. The third step ends."""

    def __init__(self, in_info=False):
        self.in_info = in_info
        observation = spaces.Box(0, 1, (1,))
        mask = spaces.Box(0, 1, (CHOICES,), np.int8)
        both = spaces.Dict({"observation": observation, MASK: mask})
        self.observation_space = observation if in_info else both
        self.action_space = spaces.Discrete(CHOICES)

    def _seen(self):
        self.mask = np.zeros(CHOICES, np.int8)
        self.mask[[self.steps % CHOICES, (self.steps + 2) % CHOICES]] = 1
        seen = np.full(1, self.steps / 10, np.float32)
        return (
            (seen, {MASK: self.mask})
            if self.in_info
            else (
                {"observation": seen, MASK: self.mask},
                {},
            )
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._seen()

    def step(self, action):
        assert self.mask[action] == 1, "an illegal action"
        self.steps += 1
        seen, info = self._seen()
        return seen, float(action), self.steps == 3, False, info


def masked_info():
    return Masked(in_info=True)


class Guess:
    """Agents of PettingZoo's form observe which step it is, in a Discrete space."""

    possible_agents = ("a", "b")

    def __init__(self, odd=False):
        self.odd = odd

    def observation_space(self, agent):
        return spaces.Discrete(4 + (self.odd and agent == "b"))

    def action_space(self, agent):
        return spaces.Discrete(3)

    def reset(self, seed=None, options=None):
        self.steps, self.agents = 0, list(self.possible_agents)
        return dict.fromkeys(self.agents, 0), {agent: {} for agent in self.agents}

    def step(self, actions):
        self.steps += 1
        agents, over = self.agents, self.steps == 3
        self.agents = [] if over else agents

        def each(value):
            return dict.fromkeys(agents, value)

        return each(self.steps), each(1.0), each(over), each(False), each({})

    def close(self):
        pass


def test_parts_that_no_network_takes_are_left_out_and_said(capfd):
    envs = make(f"{HERE}:Mission", 2)
    assert {name: box.shape for name, box in envs.observation_spaces.items()} == {"where": (5,)}
    assert envs.reset(0)["where"].tolist() == [[0, 0, 1, 0.25, 0.75]] * 2
    envs.close()
    said = capfd.readouterr().err
    assert "observation part 'mission' is Text, which no network here takes: it is left out" in said
    assert "observation part 'seen' is Sequence" in said
    assert "TransformObservation" in said
    make(f"{HERE}:Mission", 1).close()
    assert capfd.readouterr().err == ""  # once in a process


def test_an_observation_without_any_such_part_is_named():
    with pytest.raises(OptionError, match=r"part 'obs' is Text, .* make an array of it with gymn"):
        Parts(spaces.Text(4), spaces.Discrete(2), masked=False)
    with pytest.raises(OptionError, match="No module named 'nowhere'; install the package"):
        make("nowhere:Id-v0", 1)


def test_a_module_registers_its_ids(tmp_path, monkeypatch):
    text = "import gymnasium\n"
    text += "gymnasium.register('Its-v3', 'tests.learning.stubs:Steps', max_episode_steps=3)\n"
    (tmp_path / "registers_ids.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    envs = make("registers_ids:Its-v3", 1)
    envs.reset(0)
    for step in range(3):
        envs.send(np.zeros((1, 1), np.int64))
        assert envs.recv().truncated.tolist() == [step == 2]
    envs.close()


def test_agents_may_observe_in_discrete_spaces():
    envs = make(f"{HERE}:Guess", 4)
    observation = envs.reset(0)["obs"]
    for number in range(7):
        np.testing.assert_array_equal(observation, np.eye(4, dtype=np.float32)[[number % 3] * 4])
        envs.send(np.zeros((4, 1), np.int64))
        step = envs.recv()
        assert step.terminated.tolist() == [number % 3 == 2] * 4
        observation = step.observation["obs"]
    with pytest.raises(OptionError, match=r"need the same spaces .* 'b' has Discrete\(5\)"):
        Environments(ParallelEnvs([Guess(odd=True)]))


@pytest.mark.parametrize("made", ["Masked", "masked_info"])
@pytest.mark.parametrize("processes", [0, 1])
def test_masks_of_observations_and_of_infos_are_parts(made, processes):
    envs = make(f"{HERE}:{made}", 2, env_processes=processes)
    mask = envs.reset(0)[MASK]
    for number in range(1, 8):
        assert mask.sum(1).tolist() == [2, 2]
        envs.send(mask.argmax(1)[:, None])
        mask = envs.recv().observation[MASK]
        assert mask[0, number % 3] == 1
    random_means(envs, 0)
    envs.close()


def test_taxis_masks_are_taken():
    envs = make("Taxi", 2)  # the newest version
    assert envs.reset(0)[MASK].shape == (2, 6)
    envs.close()


@pytest.mark.parametrize(
    ("framework", "learner"),
    [
        ("torch", "impala"),
        ("torch", "ppo"),
        ("jax", "impala"),
        ("jax", "ppo"),
    ],
)
def test_a_policy_does_not_choose_what_a_mask_excludes(framework, learner):
    """It samples legal actions only, whose probabilities add to 1, with a finite entropy."""
    pytest.importorskip(framework)
    kind = ImpalaOptions if learner == "impala" else PpoOptions
    o = defaults(kind, {}, env_id=f"{HERE}:Masked", num_peers=1)
    envs = make_envs(o, 64)
    observation = {name: x[None] for name, x in envs.reset(0).items()}
    observation[MASK] = (np.arange(64)[:, None] % CHOICES == np.arange(CHOICES))[None]
    observation[MASK] = (observation[MASK] | (np.arange(CHOICES) == 2)).astype(np.float32)
    sampled, log_prob, entropy = policies(framework, learner, envs, o, observation)
    envs.close()
    legal = np.take_along_axis(observation[MASK][0], sampled[0], -1)
    assert legal.all()
    assert set(sampled.ravel()) == set(range(CHOICES))
    only = observation[MASK][0].sum(-1) == 1
    np.testing.assert_allclose(log_prob[0, only], 0, atol=1e-6)
    np.testing.assert_allclose(entropy[0, only], 0, atol=1e-6)
    assert (entropy[0, ~only] > 0.3).all()
    assert (entropy[0, ~only] < np.log(2) + 1e-6).all()


def policies(framework, learner, envs, o, observation):
    """Actions [1, E, 1] of a new network, their log-probabilities and the entropies [1, E]."""
    import importlib

    module = importlib.import_module(f"examples.{framework}.{learner}")
    first = np.ones((1, envs.num_envs), np.bool_)
    if framework == "torch":
        import torch

        torch.manual_seed(0)
        net = module.Net(envs, {}, o)
        moved = {name: torch.from_numpy(x) for name, x in observation.items()}
        with torch.inference_mode():
            pi, *_ = net(moved, torch.from_numpy(first), net.no_memory(envs.num_envs))
            pi = net.pi(pi) if learner == "impala" else pi
            action = pi.sample()
            return action.numpy(), pi.log_prob(action).numpy(), pi.entropy().numpy()
    import jax

    net = module.Net(envs, o)
    p = net.init(0)
    pi, *_ = net(p, net.buffers({}), observation, first, net.no_memory(envs.num_envs))
    pi = net.pi(p, pi) if learner == "impala" else pi
    action = pi.sample(jax.random.key(0))
    return tuple(np.asarray(x) for x in (action, pi.log_prob(action), pi.entropy()))
