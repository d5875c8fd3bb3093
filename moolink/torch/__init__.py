"""moolink for PyTorch."""

from moolink.torch.accumulator import Accumulator

__all__ = ["Accumulator"]
