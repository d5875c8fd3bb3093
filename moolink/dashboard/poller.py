"""Asks the members of a broker's groups for their reports, once a second."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

from moolink import metrics
from moolink._core import Lock
from moolink.dashboard.job import Job
from moolink.errors import Closed, Error
from moolink.internal import logs
from moolink.internal.shown import shown
from moolink.metrics.family import Family
from moolink.rpc import naming, report

if TYPE_CHECKING:
    from collections.abc import Callable

    from moolink._core import Future
    from moolink.group.broker_peer import Broker

INTERVAL = 1.0  # seconds


class Poller:
    """A thread that keeps a :class:`Job` up to date."""

    def __init__(self, broker: Broker, on_turn: Callable[[], None]) -> None:
        """`on_turn` is called after each turn."""
        self._on_turn = on_turn
        self._lock = Lock()  # guards the job
        self._job = Job(time.time())
        self._broker = broker
        self._rpc = broker.rpc
        self._calls: dict[str, Future] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moolink-dashboard", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join()

    def snapshot(self) -> dict[str, Any]:
        """The job as the page shows it."""
        with self._lock:
            told = self._job.snapshot(time.time())
        process = {
            family.name.removeprefix("process_"): family.samples[0].value
            for family in metrics.sources.families(self._rpc)
            if family.name.startswith("process_")
        }
        own = {"name": self._rpc.get_name(), "addresses": self._rpc.addresses(), **process}
        return {**told, "broker": own}

    def families(self) -> list[Family]:
        """The metrics of the members and of the broker."""
        own = report.PROCESS.get(), metrics.sources.families(self._rpc)
        with self._lock:
            return self._job.families({self._rpc.get_name(): own})

    def has(self, member: str) -> bool:
        """Whether this peer, by its name for calls, is a member now."""
        with self._lock:
            known = self._job.members.get(member)
            return known is not None and known.gone is None

    def explain(self, member: str, peer: str) -> Any:
        """How a member reaches a peer, as of its `Rpc.explain`. Both are names for calls.

        Raises:
            moolink.Error: the member does not say.
        """
        return self._rpc.async_(member, report.EXPLAIN, peer).result(5.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._turn()
            except Closed:
                return
            except Exception:  # noqa: BLE001 - the page would stand still without a word
                logs.logger.exception("the dashboard could not read the job")
            self._on_turn()
            self._stop.wait(max(0.0, began + INTERVAL - time.monotonic()))

    def _turn(self) -> None:
        broker, rpc = self._broker, self._rpc
        groups = {group: broker.members(group) for group in broker.groups()}
        peers = rpc.peers()
        with self._lock:
            now = time.time()
            known = {naming.of_peer(rpc, one["group"], one["name"]): one for one in peers}
            connected = {peer for peer, one in known.items() if one["connected"]}
            for peer in self._job.view(now, groups, connected):
                self._calls.pop(peer, None)
                told = rpc.explain(peer)  # it may describe a namesake
                self._job.left(now, peer, "" if told["connected"] else told["reason"])
            for peer, one in known.items():
                self._job.connection(peer, one["path"], one["latency"], one["suspected"])
            there = [peer for peer, m in self._job.members.items() if m.gone is None]
            for peer in there:
                self._take(now, peer)
            self._job.tick(now)
        # A call to a member without a connection could reach its namesake.
        taken = {naming.split(peer)[1] for peer in connected}
        for peer in there:
            is_certain = peer in connected or naming.split(peer)[1] not in taken
            if peer not in self._calls and is_certain:
                self._calls[peer] = rpc.async_(peer, report.REPORT)

    def _take(self, now: float, peer: str) -> None:
        """Takes the reply to the last call, if it has come."""
        call = self._calls.get(peer)
        if call is None or not call.done():
            return
        del self._calls[peer]
        try:
            self._job.report(now, peer, call.result())
        except Closed:
            raise
        except Error as error:
            self._job.failed(peer, str(error))
        except (TypeError, ValueError) as error:  # TypeError: the reply is not text
            self._job.failed(peer, f"its report has another form: {shown(error)}")
