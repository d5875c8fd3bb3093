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


def test_a_collector_trains_a_learner_for_100_updates():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)

    class Policy(torch.nn.Module):
        def forward(self, observation):
            action = torch.distributions.Categorical(logits=net(observation)).sample()
            return torch.nn.functional.one_hot(action, 2)

    envs = GymWrapper(
        moolink.VectorEnv(make, 4, num_workers=2, autoreset_mode="Disabled"),
        categorical_action_encoding=False,
    )
    policy = TensorDictModule(Policy(), in_keys=["observation"], out_keys=["action"])
    collector = Collector(envs, policy, frames_per_batch=64, total_frames=6400)
    updates = 0
    for batch in collector:
        chosen = (net(batch["observation"]).log_softmax(-1) * batch["action"]).sum(-1)
        still = 1.0 - batch["next", "done"][..., 0].float()
        loss = -(chosen * still).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        updates += 1
    assert updates == 100
    collector.shutdown()


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
    queue, sent = moolink.Queue(), steps()
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
