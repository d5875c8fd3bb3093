"""The compiled core. moolink re-exports the public names."""

import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from typing import Any, Self, overload

import numpy
import numpy.typing

import moolink.reports

class ReceivedTensor:
    """
    The memory of a received array. The numpy, torch and JAX arrays that moolink returns keep it alive.
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

def as_array(tensor: Any) -> numpy.typing.NDArray[Any]:
    """
    Returns a numpy view of a tensor of any framework, or a copy if the tensor is on a CUDA device. The view is read-only if the tensor must not be written.
    """

def check_array(value: object | None, name: str) -> bool:
    """
    Returns whether a value is an array or tensor. Raises TypeError, with `name` first, if it is one whose elements cannot be read as plain memory.
    """

def register_type(
    type: object,
    name: str,
    form: str,
    fields: Sequence[str],
    to_state: object | None,
    from_state: object | None,
) -> None:
    """
    Registers a type of values, see moolink.register. `form`: "dataclass", "namedtuple", "enum", "flags" or, with `to_state` and `from_state`, "converted".
    """

def set_late_registration(late: object) -> None:
    """
    Sets the function that is called with a type, or a peer's name for a type, that is not registered. It returns whether it has registered the type.
    """

def encode(
    value: object | None,
    *,
    allow_pickle: bool = False,
    max_depth: int = 200,
    max_message: int = 68719476736,
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
    max_depth: int = 200,
) -> Any:
    """The value of a message; raises WireError."""

def crc32c(bytes: bytes | memoryview | numpy.typing.NDArray[numpy.uint8], before: int = 0) -> int:
    """
    The CRC-32C of bytes, or of all bytes so far: `before` is the sum of those before these.
    """

def copy_to_host(tensors: list[Any], arrays: list[Any]) -> None:
    """
    Copies tensors on devices into host arrays of the same sizes, in row-major order.
    """

def copy_to_device(array: object, address: int, device: int) -> None:
    """Copies a host array into memory of a device that no queued work uses."""

def cuda_info() -> moolink.reports.CudaInfo:
    """Returns counts of this process's copies from and to CUDA devices."""

class Lock:
    """
    As threading.RLock, except that a thread that holds one collects no garbage, unless the program has frozen objects (gc.freeze): no destructor of the program can run there and wait for the lock, or for a thread that does. It also works with threading.Condition.
    """

    def __init__(self) -> None: ...
    def acquire(self, blocking: bool = True, timeout: float = -1.0) -> bool:
        """
        Returns whether the lock is held now; `timeout` in seconds, negative for none.
        """

    def release(self) -> None:
        """Takes back one acquire()."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        /,
    ) -> None: ...
    def drop_later(self, object: object | None) -> None:
        """
        Keeps an object, of which this may be the last reference, until this thread holds no Lock any more.
        """

    def _is_owned(self) -> bool: ...
    def _release_save(self) -> int: ...
    def _acquire_restore(self, depth: int) -> None: ...

def host_key() -> str:
    """
    Returns a text that is the same in all processes that can reach this one over shared memory.
    """

def create_uid() -> str:
    """Returns a random string of 16 hexadecimal digits."""

def set_max_threads(count: int) -> None:
    """
    Sets how many handlers and callbacks may run at once. Handlers that wait inside moolink do not count.
    """

def call_later(seconds: float, function: Callable[[], object]) -> None:
    """Calls `function()` on a worker thread after `seconds`."""

class LentSlot:
    """
    A context manager. A handler inside it does not count towards the limit of set_max_threads.
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
    Describes the state of this process as text: peers and their paths, waiting calls and running handlers with their age, groups and accumulators with the causes of their waits, threads that wait inside moolink, and the last 1,000 events. `moolink dump PID` shows the same for another process of this user.
    """

def host_addresses(interface: str) -> list[str]:
    """
    Returns the addresses of a listener on every interface that `interface` allows, loopback first. `interface` has the form of MOOLINK_INTERFACE. Raises moolink.Error if it allows nothing but loopback, ValueError if it is malformed.
    """

def openssl_info() -> moolink.reports.OpenSslInfo:
    """
    Returns the version and path of the OpenSSL that encrypts tcp, or the reason why there is none.
    """

def verbs_info() -> moolink.reports.VerbsInfo:
    """
    Returns the RDMA device, port and GID of this machine that the verbs transport uses, with all that were considered, or the reason why there is none. The first call looks for devices; if there is none, it loads no library.
    """

class Lent:
    """A value whose arrays are lent when it is sent; see moolink.lend."""

    def __init__(self, value: Any, on_release: Callable[[], object] | None = None) -> None: ...

def empty(shape: Sequence[int], dtype: str, arrays: str) -> Any:
    """See moolink.empty."""

def fill_block(
    block: numpy.typing.NDArray[numpy.uint8],
    arrays: list[numpy.typing.NDArray[Any]],
    offsets: list[int],
) -> None:
    """
    Copies each array of numbers into a block that peers will read, at its offset in bytes.
    """

class Future:
    """
    The outcome of a call or operation. It may be read any number of times, from any thread, and awaited by many tasks on any event loops.
    """

    def result(self, timeout: float | None = None) -> Any:
        """
        Waits for the result and returns it, or raises the error.

        Args:
            timeout: seconds to wait; None waits until the operation itself ends.

        Raises:
            moolink.TimeoutError: there is no result in time (the operation goes on), or the operation's own time limit has passed.
            moolink.Error: the operation failed; the subclass tells how.
        """

    def wait(self, timeout: float | None = None) -> bool:
        """
        Waits until the operation has ended, with a result or an error; returns whether it ended within `timeout` seconds.
        """

    def done(self) -> bool:
        """Whether the operation has ended."""

    def exception(self) -> BaseException | None:
        """Returns the error; None if the operation succeeded or has not ended."""

    def cancel(self) -> bool:
        """
        Cancels the operation, here and at the peer; result() then raises CancelledError. Returns False if the operation had already ended.
        """

    def add_done_callback(self, callback: Callable[[Future], object]) -> None:
        """
        Calls `callback(future)` on a worker thread once the operation has ended.
        """

    @property
    def released(self) -> Future:
        """
        A Future that is done once no peer reads the lent memory any more, so that it may be written again (see moolink.lend). If nothing was lent, it is done at once. Its result is None.
        """

    def __repr__(self) -> str: ...
    def __await__(self) -> Generator[Any, None, Any]: ...
    def __iter__(self) -> Generator[Any, None, Any]: ...

class Stream:
    """
    The items that a handler yields, in order. Iterate over it with `for` or `async for`. A few items are fetched ahead; the handler continues as they are taken.

    Iteration raises the errors of a call: moolink.TimeoutError if no item came within the peer's timeout, moolink.RemoteError after the items that the handler yielded before it raised, moolink.PeerLost, ... It raises an error once; after that, iteration ends at once.
    """

    def __iter__(self) -> Stream: ...
    def __next__(self) -> Any: ...
    def __aiter__(self) -> Stream: ...
    def __anext__(self) -> Coroutine[Any, Any, Any]: ...
    def _poll(self) -> tuple[Any, bool]:
        """Returns (item, True) if an item has arrived, else (None, False)."""

    def close(self) -> None:
        """
        Stops the handler and closes its generator; iteration then raises CancelledError after the items that had arrived. Dropping the stream does the same.
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
    The futures and streams that have become ready, for an event loop that watches fileno().
    """

    def __init__(self) -> None: ...
    def fileno(self) -> int:
        """Returns a descriptor that is readable while tokens wait for take()."""

    @overload
    def watch(self, awaitable: Future, token: object) -> int:
        """
        Makes take() return `token` once the future has ended, or the stream has an item or has ended. Returns the number of the watch, for forget().
        """

    @overload
    def watch(self, awaitable: Stream, token: object) -> int: ...
    @overload
    def forget(self, awaitable: Future, number: int) -> None:
        """Ends a watch."""

    @overload
    def forget(self, awaitable: Stream, number: int) -> None: ...
    def take(self) -> list[Any]:
        """
        Returns the tokens of futures and streams that have become ready, each once.
        """

class RpcDeferredReturn:
    """The reply of a define_deferred handler. Call it once, from any thread."""

    def __call__(self, value: Any = None) -> None:
        """
        Sends the result; an exception instance makes the call fail, as error() does. Raises moolink.Error if a reply was already sent.
        """

    def error(self, exception: BaseException) -> None:
        """Makes the call fail with RemoteError at the caller."""

    def refuse(self, reason: str) -> None:
        """
        Makes the call fail with QueueFull at the caller: the call has not begun.
        """

    def reject(self, reason: str) -> None:
        """
        Makes the call fail with RemoteError (remote_type "ValueError", ran "no") at the caller: its request cannot be carried out.
        """

    def add_cancel_callback(self, callback: Callable[[], object]) -> None:
        """
        Calls `callback()` on a worker thread as soon as the caller has stopped waiting: it cancelled the call, its time limit passed, it was lost, or this peer was closed. `callback()` is not called after a reply, nor once nothing refers to this object any more.
        """

    def cancelled(self) -> bool:
        """Whether the caller has stopped waiting, so that no reply is needed."""

    def _caller_group(self) -> str:
        """
        The group whose key the caller holds, if this peer holds the token; else "".
        """

    def __repr__(self) -> str: ...

class RpcStreamReturn(RpcDeferredReturn):
    """The reply of a streamed call, with the items before it."""

    def item(self, value: object) -> bool:
        """
        Sends an item; returns whether the caller takes another one now. Raises ValueError if the caller takes none now.
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
        arrays: the framework of received arrays: "same" (the sender's if it is imported here, else
            numpy), "numpy", "torch" or "jax".
        device: where received arrays of torch, JAX and CuPy are put: "cpu" (host memory, CuPy's as
            numpy arrays), "cuda:N", or "same": those that were sent from a CUDA device on the one of
            the same number, if this process has it. numpy arrays are always in host memory. Arrays are
            complete when they are handed over, whatever CUDA stream uses them.
        allow_pickle: sends objects other than values and arrays as pickles. Both sides must allow
            it and trust each other: unpickling runs code. A peer without a token must pass
            "insecure" instead of True.
        transports: some of "shm", "verbs" and "tcp"; the best one that reaches a peer is used. "verbs" is
            RDMA, which does not encrypt. Default: "shm" and "tcp"; "verbs", too, if the machine has a
            device and the environment variable MOOLINK_VERBS is 1 or the peer is insecure.
        timeout: time limit of a call, in seconds.
        token: the key that this peer shows and asks others for: the text of a token or of a group's
            key, or several, one a line (the first is shown, all are accepted), the path of its file as
            pathlib.Path, or a moolink.tokens.Key. Default: the file of `token_file`, else of the
            environment variable MOOLINK_TOKEN_FILE, else the user's own token, made at first use.
        token_file: path of such a file, which only its owner may be able to read.
        insecure: show no token and ask for none: any process that reaches the port may call
            every function.

    Raises:
        moolink.AuthError: a token cannot be read or made, a text is no token, or others may read its
            file.
        ValueError: the arguments contradict one another, a name or option is invalid, or a transport
            is not available.

    As a context manager, it closes itself at the end.
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
        """Returns the peer's name."""

    def set_timeout(self, seconds: float) -> None:
        """Sets the time limit of each new call, in seconds."""

    def get_timeout(self) -> float:
        """Returns the time limit of a call, in seconds."""

    def set_transports(self, names: Sequence[str]) -> None:
        """
        Chooses among "shm", "verbs" and "tcp"; moolib's names and longer ones are accepted, too. Call it before the first listen or connect.
        """

    def listen(self, address: str, advertise: str | None = None) -> list[str]:
        """
        Listens on "host:port". Port 0 takes a free one; without a host, it listens on every interface.

        Args:
            address: "host:port", "[v6]:port", ":port", "*:port", "tcp://...", or "shm://name".
            advertise: "host" or "host:port" that others are told instead of the bound addresses, if
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

    def close(self) -> None:
        """
        Takes a moment to send the last replies, tells the peers, and makes pending calls fail with moolink.Closed. Further calls of close() do nothing.
        """

    def addresses(self) -> list[str]:
        """Returns the addresses at which this peer can be reached."""

    def define(self, name: str, function: Callable[..., Any]) -> None:
        """
        Lets peers call `function` by `name`.

        It runs on a worker thread with the caller's arguments; its return value is the reply. An exception
        is raised at the caller as moolink.RemoteError, with type, text and traceback. `function` may itself
        make blocking calls.

        Raises:
            ValueError: the name is already defined.
        """

    def _define_streamed(self, name: str, function: Callable[..., Any]) -> None:
        """
        Like define_deferred, for calls by stream: the first argument is an RpcStreamReturn.
        """

    def define_deferred(self, name: str, function: Callable[..., Any]) -> None:
        """
        Like define, but `function` gets an RpcDeferredReturn as its first argument, to reply
        later and from any thread: `deferred(value)` or `deferred.error(exception)`. If it is dropped without
        a reply, the call fails at once.
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

        The arguments are captured before this returns, except those in moolink.lend(...). Calls from one
        thread to one peer start there in order. async_ does not block on the network; the future raises
        every failure:

            NoSuchFunction: the peer has no such function.
            RemoteError: the handler raised.
            PeerLost: the peer died, restarted or was closed; `.ran` tells whether the call may have run.
            TimeoutError: no answer within the time limit (set_timeout, within).
            QueueFull: too many calls wait for this peer.
        """

    def _async_within(
        self, seconds: float, peer: str, function: str, /, *args: Any, **kwargs: Any
    ) -> Future:
        """
        Like async_, with its own time limit in seconds. Below zero: none, the call waits until its peer is lost.
        """

    def _async_many_within(
        self, seconds: float, peers: Sequence[str], function: str, /, *args: Any, **kwargs: Any
    ) -> dict[str, Future]:
        """Like async_many, with a time limit as in _async_within."""

    def _stream_within(
        self, seconds: float, peer: str, function: str, /, *args: Any, **kwargs: Any
    ) -> Stream:
        """Like stream, with a time limit of each item as in _async_within."""

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
        Calls a peer's function that yields; returns a Stream of its items.

        The function is defined like any other, and is a generator or returns an iterator. Iterate over the
        stream with `for` or `async for` to get the items as they come. The handler runs up to 16 items ahead
        of the loop, and no thread waits in between. Leaving the loop and dropping the stream, or closing it,
        closes the generator.

            for batch in rpc.stream("replay", "sample", 32):
                learn(batch)

        Iteration raises the errors of a call (see async_), TimeoutError if no item came within the limit.
        """

    def stats(self) -> moolink.reports.RpcStats:
        """
        Returns this peer's counts (see moolink.reports.RpcStats): calls, frames and bytes (of all paths, and of each in "paths"), connections, failed dials and peers. "copies" counts arrays that were copied although others would not have been, "cuda" the copies from and to CUDA devices.
        """

    def peers(self) -> list[moolink.reports.PeerInfo]:
        """
        Returns a dict for each other peer that is connected or waited for (see moolink.reports.PeerInfo): the paths that are up, latency (round trip in seconds), seconds of silence, unacknowledged bytes, and calls that wait and run.
        """

    def explain(self, peer: str) -> moolink.reports.Explanation:
        """
        Explains how a peer is reached, or why it is not; returns a dict (see moolink.reports.Explanation).

        "path" is the path in use ("none" if there is none), with its round trip in seconds ("latency",
        smoothed, and "last_latency"; None before it is measured) and the "cipher" of TLS (None: data is not
        encrypted, as within one host). "paths" lists every path, best first, with the "reason" if it is not
        in use. "tried" lists the addresses that this peer could not reach, each with its error. "asked" lists
        the peers from which it requested the addresses of the name. "reason" is a summary in one sentence.
        """

    def flight_recorder(self) -> list[str]:
        """
        Returns the last events of this peer, oldest first, one a line: seconds before now, peer, kind, number of the call or connection, other peer, text. A process keeps 1,000 events.
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

    def groups(self) -> list[str]:
        """Returns the names of the groups that it knows."""

    def members(self, group: str) -> list[str]:
        """
        Returns the names of a group's members in the order of their ranks; an unknown group has none.
        """

    def close(self) -> None:
        """Stops being a broker; groups continue as they are."""

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
        """Adopts the newest view; returns whether it has changed."""

    def is_outdated(self) -> bool:
        """Returns whether update() would return True, or raise."""

    def wait_for_members(self, count: int, timeout: float | None) -> bool:
        """
        Waits until update() would show `count` members or raise; returns False after `timeout` seconds.
        """

    def members(self) -> list[str]:
        """Returns the names of the members by rank, as of the last update()."""

    def name_for_calls(self, member: str) -> str:
        """
        Returns the name by which calls reach that member, not a holder of the group's key that has taken its name.
        """

    def participants(self) -> int:
        """
        Returns the number of members that are not observers; their ranks are below it.
        """

    def rank(self) -> int | None:
        """Returns this peer's rank; None while it is in no view."""

    def epoch(self) -> int:
        """Returns the number of the view; 0: there is none."""

    def active(self) -> bool:
        """Whether there is a view."""

    def waiting_for(self) -> str:
        """
        Returns a sentence on the cause of the group's wait; "": it does not wait.
        """

    def set_timeout(self, seconds: float) -> None:
        """
        Sets for how many seconds, at least 1, this peer may be silent before it is evicted.
        """

    def set_sort_order(self, order: int) -> None:
        """Sets this peer's place among the ranks: lower comes first."""

    def set_broker_name(self, name: str) -> None:
        """Sets the name of the group's broker."""

    def closed(self) -> bool:
        """Whether the group was closed here."""

    def close(self) -> None:
        """Leaves the group."""

    def program_key(self) -> str:
        """Returns the name by which compiled programs of JAX find this group."""

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
            name: tells operations apart; the n-th start with a name meets the others' n-th start.
            kind: "all_reduce", "reduce_scatter", "all_gather", "broadcast", "gather", "scatter" or
                "barrier".
            root: the rank of the root; unused by kinds that have none.
            op: "sum", "mean", "min", "max", "prod", "and", "or" or "xor"; unused by kinds that reduce
                nothing.
            dtype: numpy's name of the elements' type.
            layout: a text that must be the same at all members.
            count: elements of a block.
            array: this member's input. An input of 64 KB or more is read until the future is done.
            output: a writable array without gaps for the result; the future's result is then None.
                None: the future's result is a new flat array.
            retry: whether the operation starts again when the group changes.
            compress: "none", "bf16" or "int8".

        Raises:
            moolink.Closed: the group is closed, or this peer is in no view.
            moolink.GroupChanged: the view has changed since the last update().
            ValueError: an argument is none of the above, or sizes do not fit.
            TypeError: `array` or `output` is not an array of numbers in host memory.
        """

    def all_reduce(self, name: str, op: str, array: Any, output: Any, retry: bool) -> Future | None:
        """
        Reduces one array of numpy, torch or JAX; returns the Future of an array of the same kind, or of `output`, which then holds the result. Returns None, and starts nothing, if the arguments need collective().
        """

    @staticmethod
    def check_reduction(op: str, dtype: str) -> None:
        """
        Raises ValueError unless elements of this dtype can be reduced by `op`.
        """

    def memory(self, bytes: int) -> numpy.typing.NDArray[numpy.uint8]:
        """
        Returns a new array of `bytes` bytes, in memory that moolink reuses later.
        """

    def all_reduce_value(
        self, name: str, value: Any, op: Callable[[Any, Any], Any], retry: bool
    ) -> Future:
        """
        Reduces any values by `op(a, b)`, in the order of the ranks; returns a Future.
        """

class TensorLayouts:
    """
    The layout that the tensors of a list must have: (shape, dtype) of each.
    """

    def __init__(self, layouts: Sequence[tuple[Sequence[int], str]]) -> None: ...
    def fit(self, tensors: list[Any]) -> bool:
        """
        Returns whether each tensor is None or has its layout, without gaps, in host memory, and is read where it lies.
        """

class SharedWords:
    """
    Words of shared memory whose changes all processes see in one order. If two processes each write a word and then read the other's, at least one of them sees the other's write.
    """

    def __init__(self, words: numpy.typing.NDArray[numpy.uint64]) -> None: ...
    def load(self, index: int) -> int:
        """Reads a word; raises IndexError if there is no such word."""

    def store(self, index: int, value: int) -> None:
        """Writes a word; raises IndexError if there is no such word."""

    def sum(self, first: int, stride: int, count: int) -> int:
        """Returns the sum of `count` words from `first`, `stride` apart."""

    def push(self, line: int, ring: int, capacity: int, entry: int) -> bool:
        """
        Writes `entry` into a ring and increments the ring's count, which is the word `line`. Returns whether the word after the count is set.
        """

    def ask(self, goal: int, wanted: int, first: int, stride: int, count: int, bell: int) -> bool:
        """
        Returns whether the sum of the words from `first` is at least `wanted`. If it is not, and the word `goal` is not `wanted`, empties the eventfd `bell`, writes `wanted` into `goal` and reads the sum again.
        """

    def serve(self, served: int, goal: int, first: int, stride: int, count: int) -> bool:
        """
        Increments the word `served`. If the sum of the words from `first` reaches the word `goal`, clears `goal` and returns True. A `goal` of 0 is never reached.
        """

class EnvironmentRows:
    """
    The environments of a pool's worker, and the shared memory for the results of their steps.
    """

    def __init__(
        self,
        environments: dict[int, Any],
        observation: object | None,
        reward: object,
        terminated: object,
        truncated: object,
        current: object,
        keeps_infos: bool,
    ) -> None:
        """
        `environments` are objects with `due` and `env`, by row. The arrays have all rows of the pool; `observation` is None if an observation is not a single array.
        """

    def step(self, first: int, actions: list[Any], take: object, begin: object) -> None:
        """
        Steps the rows from `first`, one for each action. ``begin(row)`` is called for a row that is due, ``take(row, result)`` for every result except an array of the right kind within an episode. An exception of an environment ends the call; `current` is then its row + 1.
        """

class ActionNumbers:
    """The array of a batch's actions, which are int64 numbers."""

    def __init__(self, room: object, low: int, high: int) -> None:
        """`room` has one int64 element for each row."""

    def write(self, given: object | None) -> bool:
        """
        Copies an int64 array of one number for each row, if all are from `low` to `high`; returns False, and copies nothing, for any other object.
        """

class EpisodeCounts:
    """The episodes of a batch: sums over the results of their steps."""

    def __init__(
        self,
        reward: object,
        terminated: object,
        truncated: object,
        done: object,
        episode_return: object,
        episode_step: object,
        sum: object,
    ) -> None:
        """
        The arrays of one batch: float32 rewards and returns, bool flags, int64 steps and float64 sums, which keep returns in full precision.
        """

    def count_step(self) -> None:
        """
        Counts a step whose results are in the arrays; the first step of a batch is a reset.
        """

class BatchRows:
    """The rows of a batch of numpy arrays and torch tensors on the host."""

    def __init__(self, batch: object) -> None:
        """Raises ValueError if the batch has other leaves."""

    def put(self, item: object, row: int) -> bool:
        """
        Copies an item of the batch's structure, dtypes and shapes to a row. Returns False, and copies nothing, if the item differs in any of them.
        """

class AccumulatorCore:
    """
    The base of moolink's accumulators: it takes flat buckets and returns flat results.
    """

    def __init__(
        self,
        group: GroupCore,
        name: str,
        sections: Sequence[tuple[str, int]],
        layout: str,
        observer: bool,
    ) -> None: ...
    def update(self, on_divergence: str) -> None:
        """
        Takes over the events so far. Raises the error that keeps this peer out. If this peer's parameters differ from the leader's, `on_divergence` decides: "raise", "warn", or "resync", which asks for the leader's state.
        """

    def wait(self, timeout: float) -> bool:
        """
        Waits for at most `timeout` seconds; returns whether update() may have something new.
        """

    def close(self) -> None:
        """Ends this peer's part in the rounds."""

    def connected(self) -> bool:
        """Whether this peer is an active member and has the group's model."""

    def wants_state(self) -> bool:
        """Whether set_state() is to be called."""

    def state_overdue(self) -> bool:
        """Whether a state has been wanted for 5 s."""

    def has_new_state(self) -> bool:
        """Whether new_state() has a state."""

    def wants_gradients(self) -> bool:
        """Whether offer() may be called."""

    def has_result(self) -> bool:
        """Whether take_result() has a result."""

    def model_version(self) -> int:
        """
        Returns the model's version: the number of rounds that were delivered to it.
        """

    def is_everywhere(self) -> bool:
        """Whether every member has the round that led to this model's version."""

    def leader(self) -> str:
        """Returns the name of the leader; "": there is none."""

    def is_leader(self) -> bool:
        """Whether this peer leads."""

    def set_awaited(self, text: str) -> None:
        """
        Sets the cause of this peer's wait for the log; "": the cause is the core's own.
        """

    def set_model_version(self, version: int) -> None:
        """
        Sets the version of a model from a checkpoint; raises ValueError if the group has begun at another version.
        """

    def set_virtual_batch_size(self, size: int) -> None:
        """Sets the sum of batch sizes that completes a round."""

    def set_parallel_gradients(self, rounds: int) -> None:
        """Sets how many rounds, 1 to 256, may be under way at once."""

    def set_state(self, model: object, rest: object) -> None:
        """
        Gives the snapshot for newcomers; its arrays are copied before this returns. Raises RuntimeError if none is wanted.
        """

    def new_state(self) -> tuple[int, Any, Any] | None:
        """
        Returns the number, the model and the rest of the snapshot that has arrived; None if it was given up meanwhile. The caller must not write to the model's arrays.
        """

    def state_installed(self, number: int) -> None:
        """Reports that the snapshot of this number is now the model."""

    def refuse_state(self, number: int) -> None:
        """
        Reports that the snapshot of this number cannot be used; this peer asks for another one later.
        """

    def gather(
        self, dtype: str, pieces: Sequence[tuple[object, int, int]], factor: float, clear: bool
    ) -> bool:
        """
        Writes gradients x `factor` into the bucket and, if `clear`, zeroes the gradients outside it. `pieces`: (a gradient without gaps in host memory, or None for zeros; elements; offset in the bucket in bytes). Returns whether all elements are finite.
        """

    def bucket(self) -> numpy.typing.NDArray[numpy.uint8]:
        """
        The bytes of the next contribution's bucket. gather() scales gradients that lie at their places in it without a copy. offer() lends the memory to the other members.
        """

    def offer(self, batch_size: int, counters: Mapping[str, int]) -> None:
        """
        Contributes the bucket, weighted by `batch_size`; 0: the counters alone.
        """

    def offer_unwritten(self, batch_size: int, counters: Mapping[str, int]) -> None:
        """
        Contributes the bucket while it is still being filled, from its beginning. written() reports how much is filled; withdraw() gives up the rest.
        """

    def written(self, bytes: int) -> None:
        """
        Reports that the first `bytes` bytes of the bucket are filled; the other members read them from now on. The last byte ends the contribution.
        """

    def withdraw(self) -> None:
        """
        Gives up a contribution whose bucket is not filled; its round begins again without it.
        """

    def why_not_wanted(self) -> str:
        """Returns a sentence on why wants_gradients() is false."""

    def take_result(self) -> numpy.typing.NDArray[numpy.uint8] | None:
        """
        Returns the mean of the next round as the bytes of a bucket, in memory that is the caller's; None: there is none, or it was already taken.
        """

    def norm(self, result: numpy.typing.NDArray[numpy.uint8]) -> float:
        """Returns the L2 norm of a result, or of its first sections."""

    def scale(self, result: numpy.typing.NDArray[numpy.uint8], factor: float) -> None:
        """Multiplies a result, or its first sections, by `factor` in place."""

    def release_result(self) -> None:
        """
        Reports that the result was applied, which makes room for the next round.
        """

    def checksum(self, round: int, value: int) -> None:
        """
        Reports the checksum of the parameters after a round, which the leader compares.
        """

    def stats(self) -> moolink.reports.GradientStats:
        """Returns the statistics of the round that was taken last."""

    def activity(self) -> tuple[float, float, str]:
        """
        Returns the seconds since the user's last call (0 while the user waits in one), the seconds since the user last got or supplied anything, and the cause of the accumulator's wait.
        """

def item_size(dtype: str) -> int:
    """Returns the size of an element in bytes."""

class ReplayCore:
    """
    Tables of items and the memory of their steps; see moolink.Replay. A step is a row of a store's arrays. An item is several rows, seen through a pattern.
    """

    def __init__(self, spill: str | None = None) -> None:
        """
        `spill`: the directory of a file that holds the steps; None: the steps are in memory.
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
        Adds a store for steps of these arrays: (name, dtype, shape) of each. Returns the store's index.
        """

    def add_pattern(self, store: int, width: int, pieces: Sequence[tuple[int, int, int]]) -> int:
        """
        Adds a pattern for items of `width` rows and these arrays: (column, first row, number of rows; 0: one row without the dimension of rows). Returns the pattern's index.
        """

    def append(self, store: int, leaves: list[Any]) -> int:
        """
        Stores a step, one array for each column; returns its row, to which the caller holds a reference.
        """

    def extend(
        self, store: int, leaves: list[Any], steps: int
    ) -> numpy.typing.NDArray[numpy.uint32]:
        """
        Stores several steps, along the first dimension of each array; returns their rows, like append().
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
        Stores a step and inserts it as an item; returns its key, or None if the table had no room within `timeout` seconds.
        """

    def release(self, store: int, rows: numpy.typing.NDArray[numpy.uint32]) -> None:
        """Gives up the caller's references to these rows."""

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
        Inserts items, whose rows are in `rows`, one item after another; returns the keys of those that were inserted within `timeout` seconds and before `stop` returned True.
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
        Samples up to `count` items; returns (arrays, keys, probabilities, priorities, times sampled), or None if there was none within `timeout` seconds or before `stop` returned True. `lend`: puts them into memory that a reply can lend.
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
        """Returns a table's counts."""

    def store_stats(self) -> list[moolink.reports.ReplayStoreStats]:
        """Returns the memory use of each store."""

    def snapshot(
        self,
    ) -> tuple[
        list[dict[str, numpy.typing.NDArray[Any]]], list[numpy.typing.NDArray[numpy.uint32]]
    ]:
        """
        Returns the tables' states and the stores' rows in use, as of one moment. The caller holds references to the rows until it releases them.
        """

    def read(
        self, store: int, column: int, rows: numpy.typing.NDArray[numpy.uint32]
    ) -> numpy.typing.NDArray[numpy.uint8]:
        """Returns the bytes of one column of these rows, one row after another."""

    def take(self, store: int, count: int) -> numpy.typing.NDArray[numpy.uint32]:
        """Returns new rows for write(), to which the caller holds references."""

    def write(
        self,
        store: int,
        column: int,
        rows: numpy.typing.NDArray[numpy.uint32],
        bytes: numpy.typing.NDArray[numpy.uint8],
    ) -> None:
        """Writes the result of read() into rows from take()."""

    def restore(self, table: int, state: dict[str, numpy.typing.NDArray[Any]]) -> None:
        """
        Gives a table a state from snapshot(), with the row numbers of this replay.
        """

    def close(self) -> None:
        """Ends all waits and refuses further use."""

def xla_all_reduce() -> object:
    """
    Returns the handler of moolink.jax's custom call on CPUs, for jax.ffi.register_ffi_target.
    """

def xla_all_reduce_on_cuda() -> object:
    """
    Returns the handler of moolink.jax's custom call on CUDA devices, for jax.ffi.register_ffi_target.
    """

def sources_digest() -> str:
    """
    Returns the digest of the C++ sources that this module was built from; see moolink.internal.installation.
    """
