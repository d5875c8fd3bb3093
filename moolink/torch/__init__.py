"""moolink for PyTorch: the accumulator, and states of optimizers for members in any framework."""

from moolink.internal.extras import needed_by

with needed_by("moolink.torch", "torch"):
    from moolink.torch.accumulator import Accumulator
    from moolink.torch.backward import TrainingStep
    from moolink.torch.optimizers import load_optimizer_state, optimizer_state

__all__ = ["Accumulator", "TrainingStep", "load_optimizer_state", "optimizer_state"]
