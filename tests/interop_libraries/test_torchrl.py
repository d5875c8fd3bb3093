"""TorchRL: its collectors over a VectorEnv; TensorDicts through RPC, queues and batches."""

import functools

import gymnasium
import pytest

import moolink

pytest.importorskip("torchrl", reason="needs torchrl: make test-interop")

import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torchrl.collectors import Collector
from torchrl.envs import GymWrapper
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import moolink.tensordict  # registers TensorDict

make = functools.partial(gymnasium.make, "CartPole-v1")


def test_a_rollouts_next_observation_is_the_one_that_ended_the_episode():
    envs = GymWrapper(moolink.VectorEnv(make, 4, num_workers=2, autoreset_mode="Disabled"))
    rollout = envs.rollout(100, break_when_any_done=False)
    ended = rollout["next", "terminated"][:, :-1, 0].nonzero().tolist()
    assert ended
    for env, step in ended:
        last = rollout["next", "observation"][env, step]
        assert abs(last[0]) > 2.4 or abs(last[2]) > 0.2095  # outside of CartPole's limits
        assert rollout["observation"][env, step + 1].abs().max() <= 0.05  # a first observation
    envs.close()


def test_a_learner_fed_by_a_collector_plays_well_after_100_updates():
    torch.manual_seed(0)
    envs = GymWrapper(
        moolink.VectorEnv(make, 8, num_workers=2, autoreset_mode="Disabled"),
        categorical_action_encoding=True,
    )
    envs.set_seed(0)
    policy = ProbabilisticActor(
        TensorDictModule(perceptron(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(perceptron(1))
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    ppo = ClipPPOLoss(policy, critic)
    optimizer = torch.optim.Adam(ppo.parameters(), 3e-3)
    returns, late = torch.zeros(8), []
    collector = Collector(envs, policy, frames_per_batch=1024, total_frames=25_600)
    for number, batch in enumerate(collector):
        for _ in range(4):
            advantage(batch)
            losses = ppo(batch)
            loss = sum(losses[name] for name in ("loss_objective", "loss_critic", "loss_entropy"))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        for step in batch["next"].unbind(1):
            returns += step["reward"][:, 0]
            ended = step["done"][:, 0]
            late += returns[ended].tolist() if number >= 20 else []
            returns[ended] = 0
    assert number == 24
    collector.shutdown()
    assert sum(late) / len(late) > 100  # random play: 22


def perceptron(outputs):
    return torch.nn.Sequential(
        torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, outputs)
    )


def steps(count=3):
    return TensorDict(
        {"obs": torch.arange(2.0 * count).reshape(count, 2), "next": {"reward": torch.ones(count)}},
        batch_size=[count],
    )


def test_tensordicts_travel():
    server, client = moolink.Rpc("server"), moolink.Rpc("client")
    address = server.listen("127.0.0.1:0")[0]
    client.connect(address)
    server.define("twice", lambda td: td.apply(lambda tensor: 2 * tensor))
    answer = client.sync("server", "twice", steps())
    assert isinstance(answer, TensorDict)
    assert answer.batch_size == torch.Size([3])
    assert answer["obs"].tolist() == [[0, 2], [4, 6], [8, 10]]
    assert answer["next", "reward"].tolist() == [2, 2, 2]
    client.close()
    server.close()


def test_a_queue_gives_the_same_tensordict():
    queue, sent = moolink.rpc.Queue(), steps()
    queue.enqueue(sent)
    assert queue.get() is sent


def test_batches_of_tensordicts():
    batches = moolink.Batcher(6)
    one = steps()
    assert one.to_dict()["obs"].data_ptr() == one["obs"].data_ptr()
    for _ in range(2):
        batches.cat(steps().to_dict())
    got = batches.get()
    batch = TensorDict(got, batch_size=[6])
    assert batch["obs"].data_ptr() == got["obs"].data_ptr()
    assert batch["next"].batch_size == torch.Size([6])
    assert batch["obs"][3:].equal(steps()["obs"])
