"""Copies of weights and data in the torch learners."""

import numpy as np
import pytest
import torch

import moolink
from examples.torch.common import load_published, to_device


def test_published_weights_are_copied_once_into_the_network():
    net, other = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    torch.nn.init.uniform_(other.weight)
    with moolink.Rpc("learner") as learner, moolink.Rpc("actor") as actor:
        actor.connect(learner.listen("127.0.0.1:0")[0])
        publisher = moolink.Publisher(learner, "policy")
        subscriber = moolink.Subscriber(actor, "policy", "learner", arrays="numpy")
        publisher.publish(other.state_dict())
        tree = subscriber.wait(timeout=20).tree
        assert not tree["weight"].flags.writeable  # shared with the publisher
        load_published(net, tree)
        subscriber.close()
        publisher.close()
    for mine, theirs in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    net.weight.data.fill_(7.0)  # it is the network's own memory


def test_weights_of_another_network_are_refused():
    net = torch.nn.Linear(2, 3)
    weights = {name: x.numpy().copy() for name, x in net.state_dict().items()}
    with pytest.raises(KeyError, match="bias"):
        load_published(net, {"weight": weights["weight"]})
    with pytest.raises(ValueError, match="could not broadcast"):
        load_published(net, weights | {"bias": np.zeros(4, np.float32)})


def test_on_a_cpu_nothing_is_copied():
    x = torch.arange(3)
    assert to_device(x, "cpu").data_ptr() == x.data_ptr()
