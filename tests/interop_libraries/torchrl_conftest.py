"""Runs TorchRL's own tests with moolink's buffers as TorchRL's; a conftest.py above them."""

from __future__ import annotations

import torchrl.data
import torchrl.data.replay_buffers

import moolink.torchrl


class TensorDictReplayBuffer(moolink.torchrl.ReplayBuffer):
    """Another class: TorchRL's tests give a ReplayBuffer tensors, and this one TensorDicts."""


class TensorDictPrioritizedReplayBuffer(moolink.torchrl.PrioritizedReplayBuffer):
    """As above."""


# Before the tests import them.
for module in (torchrl.data, torchrl.data.replay_buffers):
    module.ReplayBuffer = moolink.torchrl.ReplayBuffer
    module.PrioritizedReplayBuffer = moolink.torchrl.PrioritizedReplayBuffer
    module.TensorDictReplayBuffer = TensorDictReplayBuffer
    module.TensorDictPrioritizedReplayBuffer = TensorDictPrioritizedReplayBuffer
