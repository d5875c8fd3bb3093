"""The compiled core. moolink re-exports the public names."""

import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, Self, overload

import numpy
import numpy.typing

import moolink.reports

class ReceivedTensor:
    """
    Memory of a received array. It is the owner of numpy, torch and JAX arrays that moolink returns.
    """

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...

def tensor_info(tensor: Any) -> moolink.reports.TensorInfo:
    """How moolink sees a tensor: its dtype, shape, strides (elements) ..."""

def as_array(tensor: Any) -> numpy.typing.NDArray[Any]:
    """
    numpy's view of a tensor of any framework, or a copy of one on a CUDA device; read-only where it must not be written.
    """

def register_type(
    type: type[Any],
    name: str,
    form: str,
    fields: Sequence[str],
    to_state: Callable[[Any], object] | None,
    from_state: Callable[[Any], Any] | None,
) -> None:
    """
    Registers a type of values, see moolink.register. `form`: "dataclass", "namedtuple", "enum", "flags" or, with `to_state` and `from_state`, "converted".
    """

def set_late_registration(late: Callable[[type[Any] | str], bool]) -> None:
    """
    Sets what is called with a type, or a peer's name of one, that is not registered; it returns whether it registered it.
    """

def encode(
    value: Any, *, allow_pickle: bool = False, max_depth: int = ..., max_message: int = ...
) -> tuple[bytes, list[bytes]]:
    """
    The message that a value becomes: its body and the bytes of its arrays.
    """

def decode(
    body: bytes,
    parts: list[bytes],
    *,
    allow_pickle: bool = False,
    arrays: str = "same",
    max_depth: int = ...,
) -> Any:
    """The value of a message; raises WireError."""

def copy_to_host(tensors: list[Any], arrays: list[numpy.typing.NDArray[Any]]) -> None:
    """
    Copies tensors on devices into host arrays of their sizes, in row-major order.
    """

def copy_to_device(array: Any, address: int, device: int) -> None:
    """Copies a host array into memory of a device that no queued work uses."""

def cuda_info() -> moolink.reports.CudaInfo:
    """This process's copies from and to CUDA devices."""

def host_key() -> str:
    """
    The same text in all processes that can reach this one over shared memory.
    """

def create_uid() -> str:
    """A random string of 16 hexadecimal digits."""

def set_max_threads(count: int) -> None:
    """
    The most handlers and callbacks that run at once. Handlers that wait inside of moolink do not count.
    """

def call_later(seconds: float, function: Callable[[], object]) -> None:
    """Calls `function()` on a worker thread after `seconds`."""

class LentSlot:
    """
    A context manager: a handler inside of it does not count among the threads of set_max_threads.
    """

    def __init__(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        /,
    ) -> None: ...

def dump() -> str:
    """
    How things stand in this process, as text: peers and their paths, calls that wait and handlers that run with their age, groups and accumulators with the causes of their waits, threads that wait inside of moolink, and the last 1,000 events. `moolink dump PID` shows the same of another process of this user.
    """

def host_addresses(interface: str) -> list[str]:
    """
    The addresses of a listener on every interface, loopback first. Raises moolink.Error if `interface` (as MOOLINK_INTERFACE) leaves nothing but loopback, ValueError if it is malformed.
    """

def openssl_info() -> moolink.reports.OpenSslInfo:
    """
    The OpenSSL that encrypts tcp, and its path; or the reason why there is none.
    """

def verbs_info() -> moolink.reports.VerbsInfo:
    """
    The RDMA device, port and GID of this machine that the transport verbs goes through, and all that were looked at; or why there is none. The first call looks, without a device nothing is loaded.
    """

class Lent:
    """A value whose arrays are lent where it is sent; see moolink.lend."""

    def __init__(self, value: Any, on_release: Callable[[], object] | None = None) -> None: ...

def empty(shape: Sequence[int], dtype: str, arrays: str) -> Any:
    """See moolink.empty."""

def fill_block(
    block: numpy.typing.NDArray[numpy.uint8],
    arrays: list[numpy.typing.NDArray[Any]],
    offsets: list[int],
) -> None:
    """
    Copies each array of numbers to its offset, in bytes, in a block that peers will read.
    """

class Future:
    """
    The outcome of a call or operation. It may be read any number of times, from any thread, and awaited by many tasks on any event loops.
    """

    def result(self, timeout: float | None = None) -> Any:
        """
        Waits and returns the result, or raises the error.

        Args:
            timeout: seconds to wait; None waits until the operation itself ends.

        Raises:
            moolink.TimeoutError: not done in time (the operation goes on), or the operation's own limit passed.
            moolink.Error: the operation failed; the class tells how.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """
        Waits for the end, good or bad; returns whether it came within `timeout` seconds.
        """

    def done(self) -> bool:
        """Whether the operation has ended."""

    def exception(self) -> BaseException | None:
        """The error; None if the operation succeeded or has not ended."""

    def cancel(self) -> bool:
        """
        Gives the operation up, here and at the peer; result() raises CancelledError. Returns False if it had ended already.
        """

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """
        Calls `callback(future)` on a worker thread once the operation has ended.
        """

    @property
    def released(self) -> Future:
        """
        A Future that is done when no peer reads the lent memory any more (see moolink.lend): it may be written again. Done at once if it lends nothing. Its result is None.
        """

    def __repr__(self) -> str: ...
    def __await__(self) -> Generator[Any, None, Any]: ...
    def __iter__(self) -> Generator[Any, None, Any]: ...

class Stream:
    """
    The items that a handler yields, in order, as they come: iterate over it, with `for` or `async for`. A few items are fetched ahead; the handler goes on as they are taken.

    Iterating raises the errors of a call: moolink.TimeoutError if no item came within the peer's timeout, moolink.RemoteError after the items that were yielded before the handler raised, moolink.PeerLost, ... It raises it once; after that, iterating ends at once.
    """

    def __iter__(self) -> Stream: ...
    def __next__(self) -> Any: ...
    def __aiter__(self) -> Stream: ...
    def __anext__(self) -> Coroutine[Any, Any, Any]: ...
    def _poll(self) -> tuple[Any, bool]:
        """An item that has come and True, or None and False."""

    def close(self) -> None:
        """
        Stops the handler, whose generator is closed; iterating then raises CancelledError after the items that had come. Dropping the stream does the same.
        """

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        /,
    ) -> None: ...

class Completions:
    """
    Futures and streams that became ready, for an event loop that watches fileno().
    """

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """Readable while tokens wait."""

    @overload
    def watch(self, awaitable: Future, token: object) -> int:
        """
        Adds `token` to those that take() returns once the future has ended, or the stream has an item or has ended. Returns the number by which forget() knows it.
        """

    @overload
    def watch(self, awaitable: Stream, token: object) -> int: ...
    @overload
    def forget(self, awaitable: Future, number: int) -> None:
        """Ends a watch."""

    @overload
    def forget(self, awaitable: Stream, number: int) -> None: ...
    def take(self) -> list[Any]:
        """The tokens of futures and streams that became ready."""

class RpcDeferredReturn:
    """The reply of a define_deferred handler: call it once, from any thread."""

    def __call__(self, value: Any = None) -> None:
        """
        Sends the result; an exception instance makes the call fail, as error() does. Raises moolink.Error if there was a reply already.
        """

    def error(self, exception: BaseException) -> None:
        """Makes the call fail with RemoteError at the caller."""

    def refuse(self, reason: str) -> None:
        """Makes the call fail with QueueFull at the caller: it was not begun."""

    def reject(self, reason: str) -> None:
        """
        Makes the call fail with RemoteError (remote_type "ValueError", ran "no") at the caller: its request cannot be carried out.
        """

    def add_cancel_callback(self, callback: Callable[[], object]) -> None:
        """
        Calls `callback()` on a worker thread as soon as the caller has stopped waiting: it cancelled the call, its time limit passed, it was lost, or this peer was closed. Never once there was a reply, nor once nothing refers to this object any more.
        """

    def cancelled(self) -> bool:
        """Whether the caller has stopped waiting, so that no reply is needed."""

    def __repr__(self) -> str: ...

class RpcStreamReturn(RpcDeferredReturn):
    """The items and then the reply of a streamed call."""

    def item(self, value: Any) -> bool:
        """
        Sends an item; returns whether the caller takes another one now. Raises moolink.Error if it did not.
        """

    def when_room(self, callback: Callable[[], object]) -> None:
        """
        Calls `callback()` on a worker thread once the caller takes another item, or has stopped waiting.
        """

class RpcCore:
    """
    A peer: it has a unique name, calls functions of other peers and is called.

    Peers find one another by name through any peer that both are connected to, usually a broker.

    Args:
        name: unique among connected peers; default: a random one. See also set_name.
        arrays: what received arrays become: "same" (the sender's framework if it is imported here, else
            numpy), "numpy", "torch" or "jax".
        device: where received arrays of torch, JAX and CuPy are put: "cpu" (host memory, CuPy's as
            numpy arrays), "cuda:N", or "same": those that were sent from a CUDA device on the one of
            the same number, if this process has it. numpy arrays are always in host memory. Arrays are
            complete when they are handed over, for every stream.
        allow_pickle: lets other objects than values and arrays travel as pickles; both sides must
            allow it, and trust one another: unpickling runs code. A peer without a token has to say
            "insecure" instead of True.
        transports: of "shm", "verbs" and "tcp"; the best one that reaches a peer is used. "verbs" is
            RDMA, which does not encrypt. Default: "shm" and "tcp"; "verbs", too, where the environment
            variable MOOLINK_VERBS is 1 or the peer is insecure, if the machine has a device.
        timeout: time limit of a call, in seconds.
        token: the key that this peer shows and asks others for: the text of a token or of a group's
            key, several on lines of their own (the first is shown, all are accepted), the path of its
            file as pathlib.Path, or a moolink.tokens.Key. Default: the file of `token_file`, else of the environment
            variable MOOLINK_TOKEN_FILE, else the user's own token, made at first use.
        token_file: path of such a file, which only its owner may read.
        insecure: show no token and ask for none: any process that reaches the port may call
            every function.

    Raises:
        moolink.AuthError: a token cannot be read or made, or is none, or others may read its file.
        ValueError: the arguments contradict one another, or a name or option is none, or a transport
            is not there.

    It is a context manager that closes itself.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        arrays: str = "same",
        device: str = "cpu",
        allow_pickle: bool = False,
        transports: Sequence[str] | None = None,
        timeout: float = 120.0,
        keys: Sequence[tuple[bytes, str]] = [],
        key_origin: str = "",
    ) -> None: ...
    def set_name(self, name: str) -> None:
        """Names the peer; raises ValueError after the first connection."""

    def get_name(self) -> str:
        """The peer's name."""

    def set_timeout(self, seconds: float) -> None:
        """Time limit of each new call, in seconds."""

    def get_timeout(self) -> float:
        """Time limit of a call, in seconds."""

    def set_transports(self, names: Sequence[str]) -> None:
        """
        Chooses among "shm", "verbs" and "tcp" (moolib's and longer names are known too) before the first listen or connect.
        """

    def listen(self, address: str, advertise: str | None = None) -> list[str]:
        """
        Listens on "host:port"; port 0 takes a free one, no host means every interface.

        Args:
            address: "host:port", "[v6]:port", ":port", "*:port", "tcp://...", or "shm://name".
            advertise: "host" or "host:port" that others are told instead of the bound addresses, where
                they reach this peer through a forwarded port or another name.

        Returns:
            The addresses at which peers can connect. On every interface these are all addresses of the
            host (v4 and v6; loopback is tried by peers of this host only), or those that the environment
            variable MOOLINK_INTERFACE allows: names of interfaces and ranges, "eth0,10.0.0.0/8".

        Raises:
            moolink.Error: the port is in use, or the host lacks such an address.
            ValueError: an address is malformed.
        """

    def connect(self, address: str) -> None:
        """
        Connects to the peer that listens at "host:port" and keeps trying, now and whenever the connection is lost. Returns at once; raises ValueError if the address is malformed.
        """

    def addresses(self) -> list[str]:
        """Where this peer can be reached."""

    def define(self, name: str, function: Callable[..., Any]) -> None:
        """
        Lets peers call `function` by `name`.

        It runs on a worker thread with the caller's arguments; its return value is the reply. An exception
        is raised at the caller as moolink.RemoteError, with type, text and traceback. It may make blocking
        calls itself.

        Raises:
            ValueError: the name is defined already.
        """

    def _define_streamed(self, name: str, function: Callable[..., Any]) -> None:
        """
        Like define_deferred, of calls by stream: the first argument is an RpcStreamReturn.
        """

    def define_deferred(self, name: str, function: Callable[..., Any]) -> None:
        """
        Like define, but `function` gets an RpcDeferredReturn as its first argument, to reply
        later and from any thread: `deferred(value)` or `deferred.error(exception)`. Dropped without a reply,
        the caller is told so at once.
        """

    def _define_confined(self, name: str, function: Callable[..., Any], group: str) -> None:
        """
        Like define_deferred; peers that hold another group's key cannot call it.
        """

    def undefine(self, name: str) -> None:
        """
        Withdraws a function and waits until no call of it runs; a stream that has begun goes on. Raises ValueError if it is not defined.
        """

    def async_(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Future:
        """
        Calls a function of a peer; returns a Future of its result.

        The arguments are captured before this returns, but for those in moolink.lend(...). Calls of one
        thread to one peer start there in their order. Does not block on the network; every failure is the
        future's:

            NoSuchFunction: the peer has no such function.
            RemoteError: the handler raised.
            PeerLost: the peer died, restarted or was closed; `.ran` tells whether the call may have run.
            TimeoutError: no answer within the time limit (set_timeout).
            QueueFull: too many calls wait for this peer.
        """

    def _async_within(
        self, seconds: float | None, peer: str, function: str, /, *args: Any
    ) -> Future:
        """
        As async_, with a time limit of its own in seconds. None: the call waits until its peer is lost.
        """

    def async_many(
        self, peers: Sequence[str], function: str, /, *args: Any, **kwargs: Any
    ) -> dict[str, Future]:
        """
        Calls a function of each of several peers, as async_ does; the arguments are encoded once. Returns a dict from peer to Future, in the order of `peers`.
        """

    def async_callback(
        self,
        peer: str,
        function: str,
        callback: Callable[[Any, BaseException | None], object],
        /,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """
        Calls a function of a peer, as async_ does, and then `callback(result, error)` on a worker thread; error is None or the exception.
        """

    def sync(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Any:
        """
        Calls a function of a peer, as async_ does, waits for the result and returns it, or raises the error.
        """

    def stream(self, peer: str, function: str, /, *args: Any, **kwargs: Any) -> Stream:
        """
        Calls a function of a peer that yields; returns a Stream of its items.

        The function, defined as any other, is a generator or returns an iterator. Iterate over the stream,
        with `for` or `async for`, to get the items as they come. The handler is run 16 items ahead of what
        was taken, and no thread waits between. Leaving the loop and dropping the stream, or closing it,
        closes the generator.

            for batch in rpc.stream("replay", "sample", 32):
                learn(batch)

        Iterating raises the errors of a call, see async_; TimeoutError if no item came for the time limit.
        """

    def close(self) -> None:
        """
        Flushes replies for a moment, says goodbye to the peers and fails pending calls with moolink.Closed. More calls of it do nothing.
        """

    def stats(self) -> moolink.reports.RpcStats:
        """
        Counters since the beginning, see moolink.RpcStats: calls, frames and bytes (all paths, and by path in "paths"), connections, failed dials, peers; in "copies" those of arrays that others would have saved, in "cuda" those from and to CUDA devices.
        """

    def peers(self) -> list[moolink.reports.PeerInfo]:
        """
        The other peers that are connected or waited for, a dict each, see moolink.PeerInfo: the paths that are up, latency (round trip in seconds) and seconds of silence, bytes not acknowledged, calls that wait and run.
        """

    def explain(self, peer: str) -> moolink.reports.Explanation:
        """
        How a peer is reached, or why it is not: a dict, see moolink.Explanation.

        "path" is the path in use ("none" if there is none), with its round trip in seconds ("latency",
        smoothed, and "last_latency"; None before it is measured) and the "cipher" of TLS (None: data
        is not encrypted, as within one host). "paths" has every path, best first, with
        "reason" for each that is not in use; "tried" the addresses that were dialled in vain and what each
        said; "asked" the peers that were asked for the name; "reason" sums it up in one sentence.
        """

    def flight_recorder(self) -> list[str]:
        """
        The last events of this peer, oldest first, a line each: seconds before now, peer, kind, number of the call or connection, other peer, text. A context keeps 1,000.
        """

    def __repr__(self) -> str: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        /,
    ) -> None: ...

class BrokerCore:
    """The base of moolink.Broker."""

    def __init__(self, rpc: RpcCore, *, first: bool, owns: bool) -> None: ...
    def set_name(self, name: str) -> None:
        """Names the broker's peer, before the first connection."""

    def listen(self, address: str, advertise: str | None = None) -> list[str]:
        """
        Listens as Rpc.listen does; returns the addresses at which peers can connect.
        """

    def update(self) -> None:
        """Kept for moolib's scripts; nothing needs to be pumped."""

    def groups(self) -> list[str]:
        """Names of the groups it knows."""

    def members(self, group: str) -> list[str]:
        """
        Names of a group's members in the order of their ranks; empty for an unknown group.
        """

    def close(self) -> None:
        """Stops being a broker; groups go on as they are."""

    def __repr__(self) -> str: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        /,
    ) -> None: ...

class GroupCore:
    """The base of moolink.Group."""

    def __init__(self, rpc: RpcCore, name: str) -> None: ...
    def update(self) -> bool:
        """Takes over the newest view; returns whether it changed."""

    def wait_for_members(self, count: int, timeout: float | None) -> bool:
        """
        Waits until update() would show `count` members or raise; False: the time is up.
        """

    def members(self) -> list[str]:
        """Names of the members by rank, as of the last update()."""

    def rank(self) -> int | None:
        """This peer's rank; None while it is in no view."""

    def epoch(self) -> int:
        """Number of the view; 0: there is none."""

    def active(self) -> bool:
        """Whether there is a view."""

    def waiting_for(self) -> str:
        """A sentence on what the group waits for; "": nothing."""

    def set_timeout(self, seconds: float) -> None:
        """
        Sets how many seconds this peer may be silent before it is evicted; at least 1.
        """

    def set_sort_order(self, order: int) -> None:
        """Sets this peer's place among the ranks: lower comes first."""

    def set_broker_name(self, name: str) -> None:
        """Sets the name of the group's broker."""

    def closed(self) -> bool:
        """Whether the group was closed here."""

    def close(self) -> None:
        """Leaves the group."""

    def collective(
        self,
        name: str,
        kind: str,
        root: int,
        op: str,
        dtype: str,
        layout: str,
        count: int,
        array: numpy.typing.NDArray[Any],
        output: numpy.typing.NDArray[Any] | None,
        retry: bool,
        compress: str = "none",
    ) -> Future:
        """
        Starts a collective of numbers; returns its Future.

        Args:
            name: tells operations apart; the n-th start of a name meets the others' n-th start.
            kind: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter" or
                "barrier".
            root: the rank of the root; unused by kinds that have none.
            op: "sum", "mean", "min", "max", "prod", "and", "or" or "xor"; unused by kinds that reduce
                nothing.
            dtype: numpy's name of the elements' type.
            layout: text that has to be the same at all members.
            count: elements of a block.
            array: this member's input. One of at least 64 KB is read until the future is done.
            output: a writable array without gaps for the result, with which the future's result is None;
                None: the future's result is a new flat array.
            retry: whether the operation starts again when the group changes.
            compress: "none", "bf16" or "int8".

        Raises:
            moolink.Closed: the group is closed, or this peer is in no view.
            moolink.GroupChanged: the view is not the one that update() has shown last.
            ValueError: an argument is none of the above, or sizes do not fit.
            TypeError: `array` or `output` is no array of numbers in host memory.
        """

    def all_reduce(self, name: str, op: str, array: Any, output: Any, retry: bool) -> Future | None:
        """
        Reduces one array of numpy, torch or JAX; returns the Future of an array of the same kind, or of `output`, which holds the result then. Returns None if the arguments need the general way, collective(): nothing was started.
        """

    @staticmethod
    def check_reduction(op: str, dtype: str) -> None:
        """
        Raises ValueError unless elements of this dtype can be reduced by `op`.
        """

    def memory(self, bytes: int) -> numpy.typing.NDArray[numpy.uint8]:
        """A new array of so many bytes, in memory that moolink uses again later."""

    def all_reduce_value(
        self, name: str, value: Any, op: Callable[[Any, Any], Any], retry: bool
    ) -> Future:
        """
        Reduces any values by `op(a, b)`, in the order of the ranks; returns a Future.
        """

    def program_key(self) -> str:
        """The name by which compiled programs of JAX find this group."""

class TensorLayouts:
    """The required layout of the tensors of a list: (shape, dtype) of each."""

    def __init__(self, layouts: Sequence[tuple[Sequence[int], str]]) -> None: ...
    def addresses(self, tensors: list[Any]) -> list[int] | None:
        """
        Where the elements lie, 0 for None; None unless all are as they have to be, in host memory and without gaps.
        """

class SharedWords:
    """
    Words of shared memory that all processes see change in one order: one that writes its word and reads another's, and another that does so the other way round, cannot both miss the other's word.
    """

    def __init__(self, words: numpy.typing.NDArray[numpy.uint64]) -> None: ...
    def load(self, index: int) -> int:
        """Reads a word; raises IndexError if there is none."""

    def store(self, index: int, value: int) -> None:
        """Writes a word; raises IndexError if there is none."""

    def sum(self, first: int, stride: int, count: int) -> int:
        """Adds up `count` words, `stride` apart."""

    def push(self, line: int, ring: int, capacity: int, entry: int) -> bool:
        """
        Writes `entry` into a ring, whose count is the word `line`, and counts it; returns whether the word after the count is set.
        """

    def ask(self, goal: int, wanted: int, first: int, stride: int, count: int, bell: int) -> bool:
        """
        Returns whether the sum of the words from `first` is at least `wanted`. If it is not, and the word `goal` is not `wanted`, empties the eventfd `bell`, writes `wanted` into `goal` and reads the sum again.
        """

    def serve(self, served: int, goal: int, first: int, stride: int, count: int) -> bool:
        """
        Counts up the word `served`. If the sum of the words from `first` reaches `goal`, clears that and returns True; a goal of 0 is none.
        """

class EnvironmentRows:
    """
    The environments of a pool's worker, and where their steps' results lie in shared memory.
    """

    def __init__(
        self,
        environments: dict[int, Any],
        observation: numpy.typing.NDArray[Any] | None,
        reward: numpy.typing.NDArray[Any],
        terminated: numpy.typing.NDArray[numpy.bool_],
        truncated: numpy.typing.NDArray[numpy.bool_],
        current: memoryview,
        keeps_infos: bool,
    ) -> None:
        """
        `environments` by row, with `due` and `env`; arrays of all rows; `observation` is None if it is no single array.
        """

    def step(
        self,
        first: int,
        actions: list[Any],
        take: Callable[[int, Any], None],
        begin: Callable[[int], None],
    ) -> None:
        """
        Steps rows from `first`, one an action. ``take(row, result)`` gets all results but arrays of the right kind within an episode, ``begin(row)`` a row that is due. An exception of an environment ends this; the current word tells which it was.
        """

class ActionNumbers:
    """The array for a batch's actions, which are int64 numbers."""

    def __init__(self, room: numpy.typing.NDArray[numpy.int64], low: int, high: int) -> None:
        """`room` has one element for each row."""

    def write(self, given: Any) -> bool:
        """
        Copies an int64 array of one number for each row, if all are from `low` to `high`; returns False, and copies nothing, for any other object.
        """

class EpisodeCounts:
    """The episodes of a batch: the sums of its steps' results."""

    def __init__(
        self,
        reward: numpy.typing.NDArray[numpy.float32],
        terminated: numpy.typing.NDArray[numpy.bool_],
        truncated: numpy.typing.NDArray[numpy.bool_],
        done: numpy.typing.NDArray[numpy.bool_],
        episode_return: numpy.typing.NDArray[numpy.float32],
        episode_step: numpy.typing.NDArray[numpy.int64],
        sum: numpy.typing.NDArray[numpy.float64],
    ) -> None:
        """The arrays of one batch; `sum` keeps returns in full precision."""

    def count_step(self) -> None:
        """
        Counts a step whose results are in the arrays; a batch's first one is a reset.
        """

class BatchRows:
    """The rows of a batch of numpy arrays and torch tensors on the host."""

    def __init__(self, batch: Any) -> None:
        """Raises ValueError for a batch with other leaves."""

    def put(self, item: Any, row: int) -> bool:
        """
        Copies an item of the batch's structure, dtypes and shapes to a row. False: it is of another kind, and nothing was copied.
        """

class AccumulatorCore:
    """The base of moolink's accumulators: flat buckets in, flat results out."""

    def __init__(
        self,
        group: GroupCore,
        name: str,
        sections: list[tuple[str, int]],
        layout: str,
        observer: bool,
    ) -> None: ...
    def update(self, on_divergence: str) -> None:
        """
        Takes over the events so far. Raises the error that keeps this peer out; if its parameters differ from the leader's, it raises, warns or asks for the leader's state: `on_divergence` is "raise", "warn" or "resync".
        """

    def wait(self, timeout: float) -> bool:
        """
        Waits for `timeout` seconds; returns whether update() may have something new.
        """

    def close(self) -> None:
        """Takes part no more."""

    def connected(self) -> bool:
        """Whether this peer is an active member and has the group's model."""

    def wants_state(self) -> bool:
        """Whether set_state() is to be called."""

    def state_overdue(self) -> bool:
        """Whether a state has been wanted for 5 s."""

    def has_new_state(self) -> bool:
        """Whether new_state() has one."""

    def wants_gradients(self) -> bool:
        """Whether offer() may be called."""

    def has_result(self) -> bool:
        """Whether take_result() has one."""

    def model_version(self) -> int:
        """Rounds that were delivered to this model."""

    def is_everywhere(self) -> bool:
        """Whether every member has the round that led to this model's version."""

    def leader(self) -> str:
        """Name of the leader; "": there is none."""

    def is_leader(self) -> bool:
        """Whether this peer leads."""

    def set_awaited(self, text: str) -> None:
        """
        Sets what the log says this peer waits for; "": what the core itself waits for.
        """

    def set_model_version(self, version: int) -> None:
        """
        Sets the version of a model from a checkpoint; raises ValueError if the group has begun at another one.
        """

    def set_virtual_batch_size(self, size: int) -> None:
        """Sets the sum of batch sizes that makes a round."""

    def set_parallel_gradients(self, rounds: int) -> None:
        """Sets how many rounds, 1 to 256, may be under way at once."""

    def set_state(self, state: Any) -> None:
        """
        Gives the snapshot for newcomers; its arrays are copied before this returns. Raises RuntimeError if none is wanted.
        """

    def new_state(self) -> tuple[int, Any] | None:
        """
        The snapshot that has arrived, with its number; None: it was given up meanwhile.
        """

    def state_installed(self, number: int) -> None:
        """The snapshot of this number is the model now."""

    def refuse_state(self, number: int) -> None:
        """
        The snapshot of this number cannot be used: another one is asked for later.
        """

    def gather(
        self, dtype: str, pieces: Sequence[tuple[int, int, int]], factor: float, clear: bool
    ) -> bool:
        """
        Writes gradients x `factor` into the bucket and, if `clear`, zeroes the gradients outside it. `pieces`: (address of a gradient without gaps or 0, elements, offset in the bucket in bytes). Returns whether all elements are finite.
        """

    def bucket(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The bytes of the next contribution's bucket. gather() scales gradients that lie at their places in it without a copy. offer() lends the memory to the other members.
        """

    def offer(self, batch_size: int, counters: dict[str, int]) -> None:
        """
        Contributes the bucket, weighted by `batch_size`; 0: the counters alone.
        """

    def offer_unwritten(self, batch_size: int, counters: dict[str, int]) -> None:
        """
        Contributes the bucket while it is still being filled, from its beginning. written() says how far it is filled, withdraw() that the rest will not come.
        """

    def written(self, bytes: int) -> None:
        """
        The first `bytes` of the bucket are filled: the other members read them from now on. All of them end the contribution.
        """

    def withdraw(self) -> None:
        """
        Gives up a contribution that is not filled: its round begins again without it.
        """

    def why_not_wanted(self) -> str:
        """A sentence on why wants_gradients() is false."""

    def take_result(self) -> numpy.typing.NDArray[numpy.uint8] | None:
        """
        The mean of the next round, the bucket's bytes, in memory that is the caller's; None: there is none, or it was taken before.
        """

    def norm(self, result: numpy.typing.NDArray[numpy.uint8]) -> float:
        """The L2 norm of a result."""

    def scale(self, result: numpy.typing.NDArray[numpy.uint8], factor: float) -> None:
        """Multiplies a result by `factor` in its place."""

    def release_result(self) -> None:
        """The result was applied: room for the next round."""

    def checksum(self, round: int, value: int) -> None:
        """Reports the checksum of the parameters after a round, to be compared."""

    def stats(self) -> moolink.reports.GradientStats:
        """The statistics of the round that was taken last."""

    def activity(self) -> tuple[float, float, str]:
        """
        Seconds since the user's last call (0 while the user waits in one), seconds since the user last got or supplied anything, and the cause of the accumulator's wait.
        """

def item_size(dtype: str) -> int:
    """Bytes of an element."""

class ReplayCore:
    """
    Tables of items and the memory of their steps; see moolink.Replay. Steps are rows of a store's arrays, items are rows through a pattern.
    """

    def __init__(self, spill: str | None = None) -> None:
        """
        `spill`: a directory, in a file of which the steps are; None: in memory.
        """

    def add_table(
        self,
        sampler: tuple[str, float],
        remover: tuple[str, float] | None,
        max_size: int,
        max_times_sampled: int,
        limiter: tuple[float, int, float, float],
        seed: int,
    ) -> int:
        """
        Adds a table; returns its index. Selectors are (name, exponent of the priorities); without a remover, inserts wait while the table is full. `limiter`: (samples per insert, least size to sample, least and greatest difference). `max_times_sampled` 0: no limit.
        """

    def add_store(self, columns: Sequence[tuple[str, str, Sequence[int]]]) -> int:
        """
        For steps of these arrays: (name, dtype, shape) of each. Returns the store's index.
        """

    def add_pattern(self, store: int, width: int, pieces: Sequence[tuple[int, int, int]]) -> int:
        """
        For items of `width` rows and these arrays: (column, first row, number of rows, 0 for one row without the dimension of rows). Returns the pattern's index.
        """

    def append(self, store: int, leaves: list[Any]) -> int:
        """
        Stores a step, one array a column; returns its row, to which the caller refers.
        """

    def extend(
        self, store: int, leaves: list[Any], steps: int
    ) -> numpy.typing.NDArray[numpy.uint32]:
        """
        Stores several steps, the first dimension of each array; returns their rows.
        """

    def insert_step(
        self,
        table: int,
        pattern: int,
        store: int,
        leaves: list[Any],
        priority: float,
        timeout: float | None,
    ) -> int | None:
        """
        Stores a step and inserts it as an item; returns its key, None after `timeout` seconds in vain.
        """

    def release(self, store: int, rows: numpy.typing.NDArray[numpy.uint32]) -> None:
        """The caller refers to these rows no more."""

    def insert(
        self,
        table: int,
        pattern: int,
        rows: numpy.typing.NDArray[numpy.uint32],
        priorities: numpy.typing.NDArray[numpy.float64],
        timeout: float | None,
        stop: Callable[[], bool] | None = None,
    ) -> numpy.typing.NDArray[numpy.int64]:
        """
        Inserts items, whose rows follow one another in `rows`; returns the keys of those that were inserted within `timeout` seconds and before `stop` returned True.
        """

    def sample(
        self,
        table: int,
        count: int,
        timeout: float | None,
        arrays: str,
        lend: bool,
        stop: Callable[[], bool] | None = None,
    ) -> (
        tuple[
            list[Any],
            numpy.typing.NDArray[numpy.int64],
            numpy.typing.NDArray[numpy.float64],
            numpy.typing.NDArray[numpy.float64],
            numpy.typing.NDArray[numpy.uint32],
        ]
        | None
    ):
        """
        Samples up to `count` items; returns (arrays, keys, probabilities, priorities, times sampled), None if there was none within `timeout` seconds or before `stop` returned True. `lend`: into memory that calls lend.
        """

    def update(
        self,
        table: int,
        keys: numpy.typing.NDArray[numpy.int64],
        priorities: numpy.typing.NDArray[numpy.float64],
    ) -> int:
        """Sets priorities; returns how many of the keys are in the table."""

    def remove(self, table: int, keys: numpy.typing.NDArray[numpy.int64]) -> int:
        """Removes items; returns how many of the keys were in the table."""

    def reset(self, table: int) -> None:
        """Empties a table and its counts."""

    def table_stats(self, table: int) -> moolink.reports.ReplayTableStats:
        """A table's counts."""

    def store_stats(self) -> list[moolink.reports.ReplayStoreStats]:
        """The memory of each store."""

    def snapshot(
        self,
    ) -> tuple[
        list[dict[str, numpy.typing.NDArray[Any]]], list[numpy.typing.NDArray[numpy.uint32]]
    ]:
        """
        The tables' states and the stores' rows in use, of one moment. The caller refers to the rows until it releases them.
        """

    def read(
        self, store: int, column: int, rows: numpy.typing.NDArray[numpy.uint32]
    ) -> numpy.typing.NDArray[numpy.uint8]:
        """The bytes of one column of these rows, one row after another."""

    def take(self, store: int, count: int) -> numpy.typing.NDArray[numpy.uint32]:
        """New rows to be written, to which the caller refers."""

    def write(
        self,
        store: int,
        column: int,
        rows: numpy.typing.NDArray[numpy.uint32],
        bytes: numpy.typing.NDArray[numpy.uint8],
    ) -> None:
        """Writes the result of read() into rows of take()."""

    def restore(self, table: int, state: dict[str, numpy.typing.NDArray[Any]]) -> None:
        """Gives a table a state of snapshot(), in this replay's rows."""

    def close(self) -> None:
        """Ends all waits and refuses further use."""

def xla_all_reduce() -> object:
    """
    The handler of moolink.jax's custom call on CPUs, for jax.ffi.register_ffi_target.
    """

def xla_all_reduce_on_cuda() -> object:
    """
    The handler of moolink.jax's custom call on CUDA devices, for jax.ffi.register_ffi_target.
    """
