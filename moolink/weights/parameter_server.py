"""A parameter server: peers push gradients or deltas, and pull versions of the parameters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moolink._core import LentSlot
from moolink.data import batch_layout
from moolink.internal import forks
from moolink.internal.closing import Closing
from moolink.internal.integers import integer_of
from moolink.internal.keywords import names_keywords
from moolink.internal.locks import condition
from moolink.reports import ParameterServerStats
from moolink.rpc import naming, serving
from moolink.weights import names
from moolink.weights.blob import Arrays
from moolink.weights.copies import Weights
from moolink.weights.publisher import Publisher
from moolink.weights.subscriber import Subscriber

if TYPE_CHECKING:
    from moolink.rpc import Rpc

Update = Callable[[Any, Any], Any]

_ONE = batch_layout.Spec("stack", 1, 0, "cpu")


@names_keywords
class ParameterServer(Closing):
    """Holds a tree of parameters. Each push of a :class:`ParameterClient` makes its next version.

    Pushes are applied one after the other, in the order of their arrival. One that was computed
    from parameters more than `max_staleness` versions ago is dropped, and its client is told.

    Args:
        rpc: the peer that clients know as `server`.
        name: of the parameters; one server of a name at a peer.
        tree: the first parameters, as for :meth:`Publisher.publish`; they are version 0.
        update: called with the parameters and a client's pushed value; returns the next
            parameters, and may change the given ones in place. It runs on the server's own thread.
        max_staleness: how many versions a push may be behind, at least 0; None: no limit.
        publish_every: publishes each version whose number is a multiple of it. Every publication
            copies the parameters.
        like: an example of the trees that clients push. A push with another structure, or with
            arrays of other shapes or dtypes, is an error at its client, and `update` does not see
            it. None: pushes are not checked.

    Raises:
        ValueError: this peer serves that name already, or a number is out of range.
    """

    def __init__(
        self,
        rpc: Rpc,
        name: str,
        tree: Any,
        update: Update,
        *,
        max_staleness: int | None = None,
        publish_every: int = 1,
        like: Any = None,
    ) -> None:
        if not callable(update):
            raise TypeError(f"update must be callable, got {update!r}")
        if max_staleness is not None:
            max_staleness = integer_of(max_staleness, "max_staleness", least=0)
        self._publish_every = integer_of(publish_every, "publish_every", least=1)
        self._rpc = serving.peer_of(rpc)
        self._name = serving.text_of(name, "name")
        self._tree = tree
        self._update = update
        self._max_staleness = max_staleness
        self._expected = None if like is None else batch_layout.build(like, _ONE)
        self._version = 0
        self._dropped = 0
        self._failure = ""
        self._closed = False
        self._forked()
        forks.changes_in_children(self)
        self._publisher = Publisher(rpc, name)
        try:
            self._publisher.publish(tree, 0)
            self._pushes = rpc.define_queue(names.PUSH.format(name))
        except BaseException:
            self._publisher.close()
            raise
        self._thread = threading.Thread(
            target=self._serve, name=f"moolink-parameters-{name}", daemon=True
        )
        self._thread.start()

    def _forked(self) -> None:
        self._changed = condition()
        self._updating: int | None = None  # the thread in which `update` runs

    @property
    def version(self) -> int:
        """The number of pushes that were applied."""
        return self._version

    def parameters(self) -> Weights:
        """The newest parameters. They are the server's own: copy those that the next push must
        not change."""
        with self._changed:
            self._await_update()
            return Weights(self._version, self._tree)

    def stats(self) -> ParameterServerStats:
        """Returns the version, counts of pushes, and the publisher's stats."""
        with self._changed:
            return {
                "version": self._version,
                "applied": self._version,
                "dropped": self._dropped,
                "publisher": self._publisher.stats(),
            }

    def close(self) -> None:
        """Ends it, when the pushes that have come are applied. Clients keep the version that they
        have."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
        serving.undefine(self._rpc, names.PUSH.format(self._name))
        self._thread.join()
        self._publisher.close()

    def __repr__(self) -> str:
        return f"<moolink.weights.ParameterServer of {self._name!r}, version {self._version}>"

    def _serve(self) -> None:
        for reply, arguments, keywords in self._pushes:
            try:
                serving.answer(reply, self._apply(*arguments, **keywords))
            except Exception as error:  # noqa: BLE001 - the client is told
                reply.error(error)

    def _apply(self, pushed: Any, version: int) -> int | None:
        version = integer_of(version, "version", least=0)
        if self._expected is not None:
            self._expected.check(pushed)
        with self._changed:
            if self._failure:
                raise RuntimeError(self._failure)
            if version > self._version:
                raise ValueError(f"version {version} was never made: the newest is {self._version}")
            if self._max_staleness is not None and self._version - version > self._max_staleness:
                self._dropped += 1
                return None
            self._updating = threading.get_ident()
        try:
            tree = self._update(self._tree, pushed)
        except Exception as error:
            # It may have changed some of the parameters in place.
            self._failure = f"the update to version {self._version + 1} failed: {error!r}"
            raise
        else:
            self._tree = tree
            self._version += 1
            if self._version % self._publish_every == 0:
                self._publisher.publish(self._tree, self._version)
            return self._version
        finally:
            with self._changed:
                self._updating = None
                self._changed.notify_all()

    def _await_update(self) -> None:
        """Waits for the end of an update in another thread; the caller holds the lock."""
        here = threading.get_ident()
        with LentSlot():
            self._changed.wait_for(lambda: self._updating in (None, here))


@names_keywords
class ParameterClient(Closing):
    """Pulls versions of a :class:`ParameterServer`'s parameters and pushes changes.

    Args:
        rpc: this peer, connected to the server or to a peer that knows it.
        name: of the parameters.
        server: the server's peer.
        arrays: as for :class:`Subscriber`.

    Raises:
        ValueError: this peer subscribes to that name already, or `arrays` is unknown.
    """

    def __init__(self, rpc: Rpc, name: str, server: str, *, arrays: Arrays = "same") -> None:
        self._rpc = rpc
        self._name = name
        self._server = server
        self._subscriber = Subscriber(rpc, name, server, arrays=arrays)

    def pull(self, min_version: int = 0, timeout: float | None = None) -> Weights:
        """The newest version that has come, once it is at least `min_version`.

        Raises:
            TimeoutError, moolink.Closed: as :meth:`Subscriber.wait`.
        """
        return self._subscriber.wait(min_version, timeout)

    def push(self, pushed: Any, version: int) -> int | None:
        """Has the server apply gradients or deltas, and waits until it has.

        Args:
            pushed: the argument of the server's `update`: anything that can be sent.
            version: of the parameters from which it was computed.

        Returns:
            The version that it has made; None: it was too old, and was dropped.

        Raises:
            moolink.Error: the server is lost, is closed, or its `update` raised. Where
                `error.ran` is "maybe", the push may have been applied.
        """
        function = names.PUSH.format(self._name)
        made: int | None = self._rpc.sync(self._server, function, pushed, version)
        return made

    def close(self) -> None:
        """Ends it."""
        self._subscriber.close()

    def __repr__(self) -> str:
        return (
            f"<moolink.weights.ParameterClient of {self._name!r} at {naming.quoted(self._server)}>"
        )
