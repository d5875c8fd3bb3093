"""Each kind of array that is more than its elements, or has none, in each function that takes
arrays: the right values arrive, or a TypeError names its type."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import moolink
import moolink.jax
from moolink.data.frameworks import as_numpy
from moolink.env_pool import actions, spaces
from moolink.inference.states import States
from moolink.torch import Accumulator
from tests.waiting import formed

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # torch's own about prototypes

VALUES = np.arange(1, 7, dtype=np.float32).reshape(2, 3)


def plain() -> Any:
    return torch.from_numpy(VALUES.copy())


class Labelled(torch.Tensor):
    """A subclass whose memory is a plain tensor's."""


class LabelledParameter(torch.nn.Parameter):
    pass


class Producer:
    """An array of a library that moolink does not know."""

    def __init__(self, array: Any) -> None:
        self.array = array[:, ::-1]  # with strides of its own

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def freed(begin: int) -> Any:
    storage = torch.ones(12)
    tensor = storage[begin : begin + 6].view(2, 3)
    storage.untyped_storage().resize_(0)
    return tensor


def made_smaller() -> Any:
    tensor = plain().clone()
    tensor.untyped_storage().resize_(8)
    return tensor


def distributed() -> Any:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    if not torch.distributed.is_initialized():
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    mesh = DeviceMesh("cpu", [0])
    return DTensor.from_local(plain(), mesh, [Replicate()])


@pytest.fixture(scope="module", autouse=True)
def process_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def fake() -> Any:
    with FakeTensorMode():
        return torch.ones(2, 3)


def masked() -> Any:
    return torch.masked.masked_tensor(plain(), torch.ones(2, 3, dtype=torch.bool))


def deleted() -> Any:
    array = jnp.asarray(VALUES)
    array.delete()
    return array


def traced() -> Any:
    taken = []
    jax.jit(lambda x: taken.append(x) or x).trace(jnp.asarray(VALUES))
    return taken[0]


def of_transform() -> Any:
    taken = []
    torch.func.vmap(lambda x: taken.append(x) or x)(plain())
    return taken[0]


# A function that makes each kind, and the name in the error; None: its values arrive.
KINDS: dict[str, tuple[Callable[[], Any], str | None]] = {
    "plain": (plain, None),
    "parameter": (lambda: torch.nn.Parameter(plain()), None),
    "subclass": (lambda: plain().as_subclass(Labelled), None),
    "subclass_of_parameter": (lambda: LabelledParameter(plain()), None),
    "numpy": (VALUES.copy, None),
    "jax": (lambda: jnp.asarray(VALUES), None),
    "producer": (lambda: Producer(VALUES[:, ::-1]), None),
    "dtensor": (distributed, r"DTensor.*to_local\(\)"),
    "complex32": (lambda: torch.zeros(2, 3, dtype=torch.complex32), "Tensor of torch.complex32"),
    "float4": (
        lambda: torch.zeros(2, 3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "Tensor of torch.float4_e2m1fn_x2",
    ),
    "int4": (lambda: torch.empty(2, 3, dtype=torch.int4), "Tensor of torch.int4"),
    "two_tensor": (lambda: TwoTensor(plain(), plain()), "TwoTensor"),
    "masked": (masked, "MaskedTensor"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(3)] * 2), "Tensor"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(3)] * 2, layout=torch.jagged),
        "NestedTensor",
    ),
    "sparse": (lambda: plain().to_sparse(), "Tensor.*sparse_coo"),
    "csr": (lambda: plain().to_sparse_csr(), "Tensor.*sparse_csr"),
    "mkldnn": (lambda: plain().to_mkldnn(), "Tensor.*mkldnn"),
    "quantized": (
        lambda: torch.quantize_per_tensor(plain(), 0.1, 0, torch.quint8),
        "Tensor.*quint8",
    ),
    "meta": (lambda: torch.empty(2, 3, device="meta"), "Tensor.*meta"),
    "fake": (fake, "FakeTensor"),
    "functional": (lambda: torch._to_functional_tensor(plain()), "Tensor"),
    "of_zeros": (lambda: torch._efficientzerotensor((2, 3)), "Tensor"),
    "vmap": (of_transform, "Tensor"),
    "freed": (lambda: freed(0), "Tensor.*freed"),
    "freed_view": (lambda: freed(4), "Tensor.*freed"),
    "made_smaller": (made_smaller, "Tensor.*smaller"),
    "uninitialized": (lambda: torch.nn.LazyLinear(3).weight, "UninitializedParameter"),
    "masked_array": (lambda: np.ma.masked_less(VALUES, 3), "MaskedArray"),
    "deleted": (deleted, "ArrayImpl.*deleted"),
    "random_key": (lambda: jax.random.split(jax.random.key(0)), "PRNGKeyArray.*key_data"),
    "tracer": (traced, "Tracer"),
}


class Places:
    """Every place of the package that takes arrays, on one peer."""

    def __init__(self, stack: contextlib.ExitStack, address: str) -> None:
        enter = stack.enter_context
        self.enter = enter
        self.rpc = enter(moolink.Rpc("ways"))
        self.rpc.connect(address)
        self.group = enter(moolink.Group(self.rpc, "ways"))
        self.rpc.define("echo", lambda value: value)
        self.rpc.define("give", lambda: self.given)
        self.given: Any = None
        self.publisher = enter(moolink.Publisher(self.rpc, "weights"))


@pytest.fixture(scope="module")
def places() -> Iterator[Places]:
    with contextlib.ExitStack() as stack:
        broker = stack.enter_context(moolink.Broker(first=True))
        made = Places(stack, broker.listen("127.0.0.1:0")[0])
        formed([made.group], 1)
        yield made


def replay() -> moolink.Replay:
    return moolink.Replay(moolink.replay.Table("t", 9, moolink.replay.Fifo()))


def stored(value: Any) -> Any:
    with replay() as made:
        made.insert({"x": value})
        return made.sample(1).data["x"][0]


def written(value: Any) -> Any:
    with replay() as made, made.writer(1) as writer:
        writer.append({"x": value})
        writer.create_item({"x": writer.history["x"][-1:]}, table="t")
        return made.sample(1).data["x"][0][0]


def batched(put: str) -> Callable[[Places, Any], Any]:
    def way(places: Places, value: Any) -> Any:
        batcher = moolink.Batcher(2)
        getattr(batcher, put)({"x": value})
        if put == "stack":
            batcher.stack({"x": value})
            return batcher.get()["x"][1]
        return batcher.get()["x"]

    return way


def batched_after_plain(places: Places, value: Any) -> Any:
    """Along dim 1, which Python copies."""
    batcher = moolink.Batcher(2, dim=1)
    batcher.stack({"x": plain() if isinstance(value, torch.Tensor) else VALUES})
    batcher.stack({"x": value})
    return batcher.get()["x"][:, 1]


def rows_after_plain(places: Places, value: Any) -> Any:
    batcher = moolink.Batcher(2)
    batcher.stack(plain() if isinstance(value, torch.Tensor) else VALUES)
    batcher.stack(value)
    return batcher.get()[1]


def published(places: Places, value: Any) -> Any:
    places.publisher.publish({"x": value})
    with moolink.Subscriber(places.rpc, "weights", "ways") as subscriber:
        return subscriber.wait(timeout=30).tree["x"]


def sent_as_trajectory(places: Places, value: Any) -> Any:
    with moolink.TrajectoryQueue(places.rpc, "steps", max_size=2) as queue:
        writer = moolink.TrajectoryWriter(places.rpc, "steps", "ways")
        writer.put({"x": value}, begin=0)
        taken = queue.get(1, timeout=30).data["x"][0]
        writer.close()
        return taken


def returned(places: Places, value: Any) -> Any:
    places.given = value
    try:
        return places.rpc.sync("ways", "give")
    except moolink.RemoteError as error:
        raise TypeError(str(error)) from None


def accumulated(places: Places, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and type(value) in (torch.Tensor, Labelled):
        with contextlib.suppress(RuntimeError):  # some kinds have no gradients
            value.requires_grad_()
    with Accumulator("model", [value], group=places.group) as accumulator:
        return accumulator._capture_parameters()[0]


def kept_as_buffer(places: Places, value: Any) -> Any:
    with Accumulator("model", [torch.ones(1, requires_grad=True)], [value], group=places.group):
        return value


def jax_parameter(places: Places, value: Any) -> Any:
    with moolink.jax.Accumulator("model", {"x": value}, group=places.group) as accumulator:
        return accumulator.parameters()["x"]


def acted(places: Places, value: Any) -> Any:
    leaf = spaces.Leaf("action", (3,), "<f4", None, None, False, "Box")
    array = np.zeros((2, 3), np.float32)
    actions.ActionWriter(leaf, array, check=False).write(value)
    return array


def collective(kind: str) -> Callable[[Places, Any], Any]:
    def way(places: Places, value: Any) -> Any:
        data = {"x": value}
        result = getattr(places.group, kind)(kind, data).result(30)["x"]
        return result[0] if kind in ("all_gather", "gather") else result

    return way


WAYS: dict[str, Callable[[Places, Any], Any]] = {
    "call": lambda places, value: places.rpc.sync("ways", "echo", value),
    "keyword": lambda places, value: places.rpc.sync("ways", "echo", value=[value])[0],
    "result": returned,
    "lent": lambda places, value: places.rpc.sync("ways", "echo", moolink.lend(value)),
    "all_reduce": collective("all_reduce"),
    "all_reduce_of_one": lambda p, value: p.group.all_reduce("one", value).result(30),
    "reduce_scatter": collective("reduce_scatter"),
    "all_gather": collective("all_gather"),
    "broadcast": collective("broadcast"),
    "gather": collective("gather"),
    "jax_all_gather": lambda p, v: moolink.jax.all_gather(p.group, "j", {"x": v}, timeout=30)["x"][
        0
    ],
    "parameter": accumulated,
    "buffer": kept_as_buffer,
    "jax_parameter": jax_parameter,
    "publish": published,
    "replay": lambda places, value: stored(value),
    "replay_writer": lambda places, value: written(value),
    "stack": batched("stack"),
    "cat": batched("cat"),
    "stack_after_plain": batched_after_plain,
    "rows_after_plain": rows_after_plain,
    "trajectory": sent_as_trajectory,
    "state": lambda places, value: States({"x": value}, 2).gather(np.zeros(1, np.int64))["x"][0],
    "action": acted,
    "as_numpy": lambda places, value: as_numpy(value),
}

# Combinations that these functions are not meant for.
NEVER = {
    ("parameter", "numpy"),
    ("parameter", "jax"),
    ("buffer", "numpy"),
    ("buffer", "jax"),
    ("parameter", "producer"),
    ("buffer", "producer"),
    *(("jax_parameter", kind) for kind in ("plain", "parameter", "subclass")),
    ("jax_parameter", "subclass_of_parameter"),
    ("jax_parameter", "producer"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_the_right_values_or_an_error_with_the_name(places: Places, way: str, kind: str) -> None:
    make, name = KINDS[kind]
    value = make()
    if (way, kind) in NEVER:
        with pytest.raises(TypeError, match="not "):
            WAYS[way](places, value)
    elif way == "state" and kind == "random_key":
        assert WAYS[way](places, value).shape == value.shape  # JAX copies its own
    elif name is not None:
        if way in ("parameter", "buffer") and not isinstance(value, torch.Tensor):
            name = "not a torch.Tensor"
        with pytest.raises(TypeError, match=name):
            WAYS[way](places, value)
    else:
        assert np.array_equal(as_numpy(WAYS[way](places, value)), VALUES)


@pytest.mark.parametrize("way", ["all_reduce", "all_gather", "broadcast", "publish", "replay"])
def test_bytes_of_no_type_are_named(places: Places, way: str) -> None:
    with pytest.raises(TypeError, match=r"V3|void24"):
        WAYS[way](places, np.zeros(2, "V3"))


def test_a_batcher_on_a_device_of_torch_alone_leaves_its_tensors_to_torch() -> None:
    batcher = moolink.Batcher(2, device="meta")
    batcher.stack({"x": torch.empty(3, device="meta")})
    batcher.stack({"x": torch.empty(3, device="meta")})
    batch = batcher.get()["x"]
    assert (batch.device.type, batch.shape) == ("meta", (2, 3))
    with pytest.raises(TypeError, match="sparse"):
        moolink.Batcher(2, device="meta").stack({"x": plain().to_sparse()})
