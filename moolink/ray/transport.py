"""A tensor transport for Ray: actors fetch each other's tensors through moolink."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray.experimental import register_tensor_transport
from ray.experimental.rdt.tensor_transport_manager import (
    CommunicatorMetadata,
    TensorTransportManager,
    TensorTransportMetadata,
)

from moolink._core import Lock
from moolink.errors import StateError, TimeoutError
from moolink.rpc import Rpc

if TYPE_CHECKING:
    import torch

NAME = "MOOLINK"
_FETCH = "moolink.ray.fetch"
_FIND = 10.0  # seconds until an unreachable source counts as lost


def register() -> None:
    """Lets methods of actors return tensors through moolink. Call it in the process that makes the
    actors, before it defines their classes:

        moolink.ray.register()

        @ray.remote
        class Learner:
            @ray.method(tensor_transport="MOOLINK")
            def weights(self):
                return [parameter.detach() for parameter in self.net.parameters()]

    The actor keeps the tensors that such a method returns. Another actor that gets the reference
    fetches them from it: on one host over shared memory, else over TCP or InfiniBand. The transport
    takes torch tensors on the CPU. Actors listen on the address of their node. On several nodes,
    copy the job's token file to all and set `MOOLINK_TOKEN_FILE`, for example with `runtime_env`.

    Raises:
        ValueError: this process has called it before.
    """
    import torch

    register_tensor_transport(NAME, ["cpu"], TensorTransport, torch.Tensor)


@dataclass
class Place(TensorTransportMetadata):  # type: ignore[misc]
    """The peer that has an object's tensors, and its address."""

    peer: str = ""
    address: str = ""


class TensorTransport(TensorTransportManager):  # type: ignore[misc]
    """Ray makes one in each process: see :func:`register`."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._rpc: Rpc | None = None
        self._address = ""
        self._known: set[str] = set()
        self._objects: dict[str, list[torch.Tensor]] = {}

    def tensor_transport_backend(self) -> str:
        return NAME

    @staticmethod
    def is_one_sided() -> bool:
        return True

    @staticmethod
    def can_abort_transport() -> bool:
        """Returns True: a fetch ends by itself when its source dies, so abort has nothing to do."""
        return True

    def actor_has_tensor_transport(self, actor: Any) -> bool:
        return True

    def extract_tensor_transport_metadata(
        self, obj_id: str, rdt_object: list[torch.Tensor]
    ) -> Place:
        peer = self._peer()
        with self._lock:
            self._objects[obj_id] = rdt_object
        return Place(
            tensor_meta=[(tensor.shape, tensor.dtype) for tensor in rdt_object],
            tensor_device="cpu",
            peer=peer.get_name(),
            address=self._address,
        )

    def get_communicator_metadata(
        self, src_actor: Any, dst_actor: Any, backend: str | None = None
    ) -> CommunicatorMetadata:
        return CommunicatorMetadata()

    def recv_multiple_tensors(
        self,
        obj_id: str,
        tensor_transport_metadata: Place,
        communicator_metadata: CommunicatorMetadata,
        target_buffers: list[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Fetches an object's tensors.

        Raises:
            moolink.PeerLost, moolink.TimeoutError: the actor that has them died, or cannot be
                reached.
            moolink.StateError: that actor has freed the object.
        """
        place, peer = tensor_transport_metadata, self._peer()
        if place.peer not in self._known:
            peer.connect(place.address)
            found = peer.async_(place.peer, _FETCH, "")
            if not found.wait(_FIND):
                found.cancel()
                raise TimeoutError(
                    f"the actor with object {obj_id} cannot be reached at {place.address} within "
                    f"{_FIND:g} s: is it alive, and have both the same token (MOOLINK_TOKEN_FILE)?"
                )
            found.result()
            self._known.add(place.peer)
        tensors: list[torch.Tensor] = peer.sync(place.peer, _FETCH, obj_id)
        if tensors is None:
            raise StateError(f"object {obj_id} is not at {place.peer!r} any more")
        if target_buffers is None:
            return tensors
        for buffer, tensor in zip(target_buffers, tensors, strict=True):
            buffer.copy_(tensor)
        return target_buffers

    def send_multiple_tensors(self, *_: Any) -> None:
        raise NotImplementedError("receivers fetch; nothing is sent")

    def garbage_collect(self, obj_id: str, *_: Any) -> None:
        with self._lock:
            self._objects.pop(obj_id, None)

    def abort_transport(self, *_: Any) -> None:
        """Does nothing: see can_abort_transport."""

    def _peer(self) -> Rpc:
        with self._lock:
            if self._rpc is None:
                self._rpc = Rpc()
                self._rpc.define(_FETCH, self._objects.get)
                self._address = self._rpc.listen(f"{ray.util.get_node_ip_address()}:0")[0]
            return self._rpc
