"""moolib's Accumulator."""

from __future__ import annotations

from moolink.compat.moolib.arguments import with_runtime_errors
from moolink.compat.moolib.rpc import Rpc
from moolink.torch import Accumulator as TorchAccumulator


@with_runtime_errors(
    "__init__",
    "connect",
    "reduce_gradients",
    "set_model_version",
    "set_parallel_gradients",
    "set_state",
    "set_virtual_batch_size",
    "skip_gradients",
    "update",
)
class Accumulator(TorchAccumulator):
    """Elastic data-parallel training, as :class:`moolink.torch.Accumulator`. The Rpc that it makes
    without a group sends pickled states, as :class:`Rpc` does."""

    _kind_of_rpc = Rpc
