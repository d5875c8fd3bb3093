"""moolink for PyTorch."""

from moolink.torch.accumulator import Accumulator
from moolink.training_steps import TrainingStep

__all__ = ["Accumulator", "TrainingStep"]
