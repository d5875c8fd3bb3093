"""Weight updates for TorchRL's collectors, through a Publisher and Subscribers."""

from __future__ import annotations

import time
from typing import Any, Literal

from tensordict import TensorDict, TensorDictBase
from torch import nn
from torchrl.weight_update import WeightStrategy
from torchrl.weight_update import WeightSyncScheme as TorchRLWeightSyncScheme

from moolink.errors import TimeoutError
from moolink.internal import deadlines
from moolink.internal.locks import condition
from moolink.rpc import Rpc
from moolink.weights import Publisher, Subscriber

_APPLIED = "moolink.torchrl.applied"
_LOOK = 1.0  # seconds between two checks whether a worker's thread must stop


class WeightSyncScheme(TorchRLWeightSyncScheme):  # type: ignore[misc]
    """Updates the weights of TorchRL's collectors through moolink:

        scheme = moolink.torchrl.WeightSyncScheme()
        collector = MultiSyncCollector(envs, policy, weight_sync_schemes={"policy": scheme})

    The sender publishes whole versions, and all workers of a host map one copy. A thread of each
    worker writes the newest version into the model, as TorchRL's own schemes do, and skips those in
    between. Programs that TorchRL did not start give the scheme an address, and the sender gives
    the number of workers:

        scheme = moolink.torchrl.WeightSyncScheme("10.0.0.1:4455")
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=8)  # in the trainer
        scheme.init_on_receiver(model_id="policy", model=policy, worker_idx=3)  # in worker 3
        scheme.connect()  # in both; the trainer then calls send()

    Args:
        address: the address on which the sender listens.
        sync: whether `send` waits until all workers have the version in their models.
        timeout: seconds for which `send` and `connect` wait.
        strategy: TorchRL's way to read the weights of a model: "tensordict" or "state_dict".
    """

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        sync: bool = True,
        timeout: float = 60.0,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
    ) -> None:
        super().__init__(strategy)
        self._address = address
        self._sync = sync
        self._timeout = timeout
        self._num_workers = 0
        self._end: _Sender | _Worker | None = None

    def create_transport(self, **_: Any) -> Any:
        """Returns the transport of this process."""
        return self._end

    def send(self, weights: Any = None, worker_ids: int | list[int] | None = None) -> None:
        """Publishes weights; with `sync`, waits until all workers have them.

        Args:
            weights: a module, a TensorDict or a state dict; None: those of the model.
            worker_ids: must be None, because the update goes to every worker.

        Raises:
            ValueError: `worker_ids` is given.
            TimeoutError: some workers do not have them after `timeout`; the message names those.
            RuntimeError: `init_on_sender` and `connect` were not called.
        """
        if worker_ids is not None:
            raise ValueError("every worker takes every version: worker_ids must be None")
        if not isinstance(self._end, _Sender) or not self.synchronized_on_sender:
            raise RuntimeError("call init_on_sender() and connect() before send()")
        version = self._publish(weights)
        if self._sync:
            self._end.wait(version, self._num_workers, self._timeout)

    def shutdown(self) -> None:
        """Ends the thread, and closes the peer of this process."""
        end, self._end = getattr(self, "_end", None), None
        super().shutdown()
        if end is not None:
            end.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            **super().__getstate__(),
            "_end": None,
            "_receiver_transport": None,
            "_shared_transport": None,
        }

    def _init_on_sender_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: nn.Module | None = None,
        num_workers: int | None = None,
        **_: Any,
    ) -> None:
        self._concern(model_id, context, model)
        workers = getattr(context, "num_workers", 1)
        self._num_workers = workers if num_workers is None else num_workers
        self._end = _Sender(self._address, model_id)
        self._address = self._end.address  # pickling this object takes it to the workers

    def _init_on_receiver_impl(
        self,
        *,
        model_id: str,
        context: Any = None,
        model: nn.Module | None = None,
        worker_idx: int | None = None,
        **_: Any,
    ) -> None:
        self._concern(model_id, context, model)
        self.worker_idx = getattr(context, "worker_idx", 0) if worker_idx is None else worker_idx
        self._end = self._receiver_transport = _Worker(self._address, model_id, self.worker_idx)

    def _concern(self, model_id: str, context: Any, model: nn.Module | None) -> None:
        """Sets the model that this process sends or receives, or the collector that has it."""
        self.model_id = model_id
        if context is not None:
            self.context = context
        if model is not None:
            self.model = model

    def _setup_connection_and_weights_on_sender_impl(
        self, *, worker_idx: int | None = None, weights: Any = None
    ) -> None:
        self._publish(weights)

    def _setup_connection_and_weights_on_receiver_impl(
        self, *, worker_idx: int | None = None
    ) -> None:
        if self.receive(self._timeout) is None:
            raise TimeoutError(
                f"no weights came from {self._address} within {self._timeout:g} s: has the sender "
                "called connect()?"
            )
        self._start_background_receiver()

    def _wait_for_instruction(self, timeout: float | None = None) -> str | None:
        """Waits for the next version."""
        wait = deadlines.Wait(timeout)
        while not self._stop_event.is_set() and not wait.over and isinstance(self._end, _Worker):
            if self._end.has_news(_LOOK if wait.left is None else min(_LOOK, wait.left)):
                return "receive"
        return None

    def _publish(self, weights: Any) -> int:
        if weights is None and self.context is None:
            weights = self.model
        prepared = self.prepare_weights(weights, self._model_id, self._strategy, self.context)
        if prepared is None:
            raise ValueError(
                "there are no weights to send: give init_on_sender() a model, and keep it"
            )
        assert isinstance(self._end, _Sender)
        return self._end.publish(prepared)


class _Sender:
    """The peer of the process that publishes."""

    def __init__(self, address: str, name: str) -> None:
        self._applied: dict[int, int] = {}  # the version of each worker
        self._changed = condition()
        self._rpc = Rpc(_sender_of(name))
        self._rpc.define(_APPLIED, self._on_applied)
        self.address = self._rpc.listen(address)[0]
        self._publisher = Publisher(self._rpc, name)

    def publish(self, weights: Any) -> int:
        tree = weights.to_dict() if isinstance(weights, TensorDictBase) else weights
        # Numbers are microseconds: above those of a sender of before, whose workers may be there.
        last = self._publisher.version or 0
        return self._publisher.publish(tree, max(last + 1, time.time_ns() // 1000))

    def wait(self, version: int, num_workers: int, timeout: float) -> None:
        wait = deadlines.Wait(timeout)
        with self._changed:
            while late := [i for i in range(num_workers) if self._applied.get(i, -1) < version]:
                if wait.over:
                    raise TimeoutError(
                        f"workers {late} have not taken the weights after {timeout:g} s: are they "
                        "running, and do they have the same model?"
                    )
                wait.for_change(self._changed, f"send() waits for workers {late}")

    def close(self) -> None:
        self._publisher.close()
        self._rpc.close()

    def _on_applied(self, worker: int, version: int) -> None:
        with self._changed:
            self._applied[worker] = version
            self._changed.notify_all()


class _Worker:
    """The peer of a process that receives the weights."""

    def __init__(self, address: str, name: str, index: int) -> None:
        self._index, self._sender = index, _sender_of(name)
        self._version = -1
        self._rpc = Rpc()
        self._rpc.connect(address)
        self._subscriber = Subscriber(self._rpc, name, self._sender, arrays="torch")

    def has_news(self, timeout: float) -> bool:
        try:
            self._subscriber.wait(self._version + 1, timeout)
        except TimeoutError:
            return False
        return True

    def receive_weights(
        self,
        timeout: float | None = None,
        *,
        weights: Any = None,
        model: Any = None,
        strategy: WeightStrategy | None = None,
    ) -> TensorDict | None:
        """Writes the newest version into the model, if there is one since the last."""
        try:
            newest = self._subscriber.wait(self._version + 1, timeout)
        except TimeoutError:
            return None
        self._version = newest.version  # one that does not fit is not tried again
        received = TensorDict(newest.tree)
        if any("." in key for key in newest.tree):  # a state dict
            received = received.unflatten_keys(".")
        if model is not None and strategy is not None:
            # Collectors give their workers a policy on the meta device, which has no memory yet.
            bare = any(x.is_meta for x in [*model.parameters(), *model.buffers()])
            strategy.apply_weights(model, received.clone() if bare else received, inplace=not bare)
        return received

    def send_ack(self, message: str = "updated") -> None:
        self._rpc.async_(self._sender, _APPLIED, self._index, self._version)

    def close(self) -> None:
        self._subscriber.close()
        self._rpc.close()


def _sender_of(name: str) -> str:
    return f"weights of {name}"
