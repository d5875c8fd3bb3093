"""moolink behind TorchRL's interfaces: replay buffers and a weight sync scheme."""

from moolink.internal.extras import needed_by

with needed_by("moolink.torchrl", "torchrl"):
    from moolink.torchrl.replay_buffer import PrioritizedReplayBuffer, ReplayBuffer
    from moolink.torchrl.weight_sync import WeightSyncScheme

__all__ = ["PrioritizedReplayBuffer", "ReplayBuffer", "WeightSyncScheme"]
