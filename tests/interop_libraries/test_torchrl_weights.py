"""Weight updates of TorchRL's collectors, through moolink."""

import multiprocessing
import pickle
import threading

import gymnasium
import pytest

import moolink

pytest.importorskip("torchrl", reason="needs torchrl: make test-interop")

import torch
from tensordict.nn import TensorDictModule
from torchrl.collectors import MultiSyncCollector
from torchrl.envs import GymWrapper

import moolink.torchrl


class Constant(torch.nn.Module):
    """A policy whose action tells whether the number in its weights is odd."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        self.register_buffer("number", torch.zeros(()))

    def forward(self, observation):
        odd = (self.number % 2).expand(observation.shape[:-1])
        return torch.stack([1 - odd, odd], -1).long()


def make_policy():
    return TensorDictModule(Constant(), in_keys=["observation"], out_keys=["action"])


def make_env():
    return GymWrapper(gymnasium.make("CartPole-v1"), categorical_action_encoding=False)


def set_weights(policy, number):
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(number)
        policy.module.number.fill_(number)


def test_a_collectors_workers_take_each_update():
    policy = make_policy()
    set_weights(policy, 1)
    collector = MultiSyncCollector(
        [make_env, make_env],
        policy,
        frames_per_batch=32,
        total_frames=96,
        weight_sync_schemes={"policy": moolink.torchrl.WeightSyncScheme()},
    )
    actions = []
    try:
        for batch in collector:
            actions.append(set(batch["action"].argmax(-1).flatten().tolist()))
            set_weights(policy, len(actions) + 1)
            collector.update_policy_weights_()
    finally:
        collector.shutdown()
    assert actions == [{1}, {0}, {1}]


def worker(scheme, index, pipe):
    """A process that TorchRL did not start."""
    scheme = pickle.loads(scheme)
    model = make_policy()
    scheme.init_on_receiver(model_id="policy", model=model, worker_idx=index)
    scheme.connect()
    while pipe.recv() == "weights":
        pipe.send([x.flatten()[0].item() for x in model.state_dict().values()])
    scheme.shutdown()


@pytest.mark.parametrize("strategy", ["tensordict", "state_dict"])
@pytest.mark.filterwarnings("ignore:state_dict strategy is experimental")
def test_send_returns_when_all_workers_have_the_weights(strategy):
    spawn = multiprocessing.get_context("spawn")
    policy = make_policy()
    set_weights(policy, 1)
    scheme = moolink.torchrl.WeightSyncScheme(strategy=strategy)
    with pytest.raises(RuntimeError, match="connect"):
        scheme.send()
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=2)
    pipes, processes = [], []
    for index in range(2):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=worker, args=(pickle.dumps(scheme), index, theirs))
        process.start()
        pipes.append(ours)
        processes.append(process)
    scheme.connect()
    for number in (2, 3):
        set_weights(policy, number)
        scheme.send(None if number == 2 else policy)
        for pipe in pipes:
            pipe.send("weights")
            assert pipe.recv() == [number] * 3
    with pytest.raises(ValueError, match="worker_ids"):
        scheme.send(worker_ids=0)
    for pipe in pipes:
        pipe.send("end")
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    scheme.shutdown()


def test_what_is_missing_is_named():
    model = make_policy()
    sender = moolink.torchrl.WeightSyncScheme(timeout=0.1)
    sender.init_on_sender(model_id="policy", model=model, num_workers=3)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=make_policy(), worker_idx=1)
    with pytest.raises(
        moolink.TimeoutError, match=r"no weights came .* has the sender called conn"
    ):
        receiver.connect()
    sender.connect()
    with pytest.raises(moolink.TimeoutError, match=r"workers \[0, 1, 2\] have not taken"):
        sender.send()
    receiver.shutdown()
    sender.shutdown()


def pair(sender, model, policy):
    """A receiver of this process, for a sender that has no connections yet."""
    sender.init_on_sender(model_id="policy", model=model, num_workers=1)
    receiver = pickle.loads(pickle.dumps(sender))
    receiver.init_on_receiver(model_id="policy", model=policy, worker_idx=0)
    sender.connect()
    receiver.connect()
    return receiver


def test_weights_of_another_model_are_refused_once(monkeypatch):
    model, policy = make_policy(), make_policy()
    sender = moolink.torchrl.WeightSyncScheme(timeout=0.5)
    receiver = pair(sender, model, policy)
    refused = []
    apply_weights = receiver._strategy.apply_weights

    def apply(*args, **options):
        try:
            apply_weights(*args, **options)
        except Exception as error:
            refused.append(error)
            raise

    monkeypatch.setattr(receiver._strategy, "apply_weights", apply)
    with pytest.raises(moolink.TimeoutError, match=r"workers \[0\] have not taken"):
        sender.send(torch.nn.Linear(5, 5))
    assert len(refused) == 1
    set_weights(model, 7)
    sender.send()
    assert policy.module.number == 7
    receiver.shutdown()
    sender.shutdown()


def test_workers_follow_a_sender_that_is_started_again():
    model, policy = make_policy(), make_policy()
    sender = moolink.torchrl.WeightSyncScheme(timeout=20)
    receiver = pair(sender, model, policy)
    for _ in range(3):
        sender.send()
    sender.shutdown()
    again = moolink.torchrl.WeightSyncScheme(sender._address, timeout=2)
    set_weights(model, 7)
    again.init_on_sender(model_id="policy", model=model, num_workers=1)
    again.connect()
    again.send()
    assert policy.module.number == 7
    receiver.shutdown()
    again.shutdown()


def test_an_address_in_use_leaves_no_publisher():
    with moolink.Rpc("other") as other:
        address = other.listen("127.0.0.1:0")[0]
        scheme = moolink.torchrl.WeightSyncScheme(address)
        with pytest.raises(moolink.Error, match="in use"):
            scheme.init_on_sender(model_id="unheard", model=make_policy(), num_workers=1)
    assert "moolink-publisher-unheard" not in [thread.name for thread in threading.enumerate()]
