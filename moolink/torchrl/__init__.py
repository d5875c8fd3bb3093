"""moolink behind TorchRL's interfaces: a replay buffer and a weight sync scheme."""

from moolink.torchrl.replay_buffer import ReplayBuffer
from moolink.torchrl.weight_sync import WeightSyncScheme

__all__ = ["ReplayBuffer", "WeightSyncScheme"]
