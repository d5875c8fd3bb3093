"""moolink under TorchRL's interfaces: a replay buffer and a scheme of weight updates."""

from moolink.torchrl.replay_buffer import ReplayBuffer
from moolink.torchrl.weight_sync import WeightSyncScheme

__all__ = ["ReplayBuffer", "WeightSyncScheme"]
