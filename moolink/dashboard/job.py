"""The dashboard's state of a job. It receives views and reports, and does no I/O."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from moolink.dashboard import report
from moolink.dashboard.report import OBSERVER, Model, Report
from moolink.metrics.family import Family, Sample, exposed
from moolink.metrics.table import BY_NAME
from moolink.rpc import naming

HISTORY = 300  # points, one a second
EVENTS = 200
SILENT = 3.5  # seconds without a report, after which a member is shown as silent
GONE = 600.0  # seconds for which a member is still shown after it has gone

FEW_ROUNDS = 4  # with fewer rounds a member is not judged
RECENT = 16  # rounds that determine the slowest member
IDLE = 10.0  # seconds without a contribution, after which a member is shown as idle
MOST_SCRIPTS = 8  # of a group, that are shown
LEADER = "leader"
_IDLE = (
    "it applies the rounds and contributes to none: its loop must call step.reduce(), or "
    "step.skip() where it has nothing"
)
_WRONG = ("silent", "suspected", "stuck")
_WINDOW = 10.0  # seconds over which steps are counted: a round may take several
_LONG_WINDOW = 60.0  # seconds, for the time that is left
_LOST = "lost: "  # how Rpc.explain begins for a peer that was connected
_CLOSED = f"{_LOST}it was closed"  # the same, if the peer has said that it goes


class Growth:
    """The recent values of a counter."""

    def __init__(self, window: float = _WINDOW) -> None:
        self._window = window  # seconds
        self._values: collections.deque[tuple[float, float]] = collections.deque()

    def add(self, now: float, value: float) -> None:
        """Adds the value that the counter has now."""
        if self._values and value < self._values[-1][1]:
            self._values.clear()  # the counter was reset
        self._values.append((now, value))
        while len(self._values) > 2 and self._values[1][0] <= now - self._window:
            self._values.popleft()

    def rate(self) -> float:
        """Its growth per second."""
        if not self._values:
            return 0.0
        (began, first), (ended, last) = self._values[0], self._values[-1]
        return (last - first) / (ended - began) if ended > began else 0.0


@dataclasses.dataclass
class Member:
    """A peer that is or was a member of a group, or connected to the broker."""

    peer: str  # the unique name with which the broker calls it
    groups: list[str]
    joined: float  # Unix time, as the broker has seen it
    gone: float | None = None
    closed: bool = False  # it has said that it goes: a normal end
    suspected: bool = False
    why: str = ""  # it gave no report
    path: str = ""  # between it and the broker
    latency: float | None = None
    reported: float | None = None
    last: Report | None = None
    told: str = "new"  # its state at the last event
    rates: dict[str, float] = dataclasses.field(default_factory=dict)
    counted: dict[str, Growth] = dataclasses.field(
        default_factory=dict
    )  # steps of rounds, by group

    progress: dict[tuple[str, str, str], Growth] = dataclasses.field(
        default_factory=dict
    )  # of totals with a target, by group, model and counter

    @property
    def name(self) -> str:
        """Its name; a peer with another group's key may have the same one."""
        return naming.split(self.peer)[1]

    @property
    def host(self) -> str:
        """Its host; "" if it has not reported."""
        return "" if self.last is None else self.last.host

    @property
    def pid(self) -> int:
        """Its process ID; 0 if it has not reported."""
        return 0 if self.last is None else self.last.pid

    @property
    def process(self) -> str:
        """The id of its process, unique also across containers."""
        return "" if self.last is None else self.last.process

    @property
    def models(self) -> list[Model]:
        """Its models."""
        return [] if self.last is None else self.last.models

    def is_fresh(self, now: float) -> bool:
        """Whether its last report is recent."""
        return self.gone is None and self.reported is not None and now - self.reported <= SILENT

    def state(self, now: float) -> str:
        """ "left" (a normal end), "gone", "suspected", "silent", "new" (without a report so far),
        "stuck" or "up"."""
        if self.gone is not None:
            return "left" if self.closed else "gone"
        if self.suspected:
            return "suspected"
        if self.reported is None:
            return "new" if now - self.joined < SILENT else "silent"
        if now - self.reported > SILENT:
            return "silent"
        return "stuck" if any(model.is_stuck() for model in self.models) else "up"

    def note(self, now: float) -> str:
        """The reason for its state, and the remedy."""
        state, where = self.state(now), f"`py-spy dump --pid {self.pid}` on {self.host} shows where"
        if state == "stuck":
            idle = max(model.idle for model in self.models)
            share = self.rates.get("cpu", 0.0)
            does = "it computes or loops" if share > 0.2 else "it sleeps or waits"
            return (
                f"its loop has not called moolink for {idle:.0f} s, with {share:.0%} of a core: "
                f"{does}; {where}; if it hangs, kill it"
            )
        if state == "silent" and not self.why and self.reported is not None:
            return (
                f"no report for {now - self.reported:.0f} s: its process hangs, or holds Python's "
                f"GIL; {where}"
            )
        if state == "suspected" and not self.why:
            return self._silence()
        return self.why

    def _silence(self) -> str:
        return (
            "nothing comes from it: its process is stopped, or its host or network is down; "
            f"`ps -o stat {self.pid}` on {self.host} shows T if it is stopped"
        )

    def left(self, why: str) -> None:
        """It has gone; `why` is the broker's connection's reason; \"\": it has none."""
        self.closed = why.startswith(_CLOSED)
        if not why:
            self.why = "the reason is unknown: another peer has its name"
        elif self.closed:
            self.why = ""
        elif self.suspected:
            self.why = self._silence()
        else:
            self.why = (
                f"its process was killed or crashed, or its host is down: {why.removeprefix(_LOST)}"
            )

    def role(self) -> str:
        """Its role in its models; "peer": it has none."""
        return next((model.role for model in self.models), "peer")


class Job:
    """Members, their last reports, and the events of the job.

    A member is identified by the name with which the broker calls it (naming.of_peer), here called
    `peer`: two groups may have members of one name.
    """

    def __init__(self, now: float) -> None:
        self.began = now
        self.members: dict[str, Member] = {}
        self.groups: dict[str, dict[str, str]] = {}  # of each group: peers by their names
        self._events: collections.deque[dict[str, Any]] = collections.deque(maxlen=EVENTS)
        self._history: dict[str, collections.deque[tuple[float, float, float | None]]] = {}

    # Input

    def view(
        self, now: float, groups: Mapping[str, list[str]], connected: Iterable[str] = ()
    ) -> list[str]:
        """The groups have members of these names, and these peers are connected to the broker, in
        a group or not. Returns those that have gone."""
        of_member: dict[str, list[str]] = {peer: [] for peer in connected}
        there = set(of_member)
        self.groups = {
            group: {name: self._member_of(group, name, there) for name in names}
            for group, names in groups.items()
            if names
        }
        for group, peers in self.groups.items():
            for peer in peers.values():
                of_member.setdefault(peer, []).append(group)
        for peer, belongs in of_member.items():
            member = self.members.get(peer)
            if member is None or member.gone is not None:
                self.members[peer] = Member(peer, belongs, now)
                self._event(now, "joined", peer, belongs)
            else:
                if lost := [group for group in member.groups if group not in belongs]:
                    self._event(now, "left", peer, lost)
                if new := [group for group in belongs if group not in member.groups]:
                    self._event(now, "joined", peer, new)
                member.groups = belongs
        gone = []
        for peer, member in list(self.members.items()):
            if peer not in of_member and member.gone is None:
                member.gone = now
                if member.last is not None:
                    member.last = member.last.remains()
                gone.append(peer)
            elif member.gone is not None and now - member.gone > GONE:
                del self.members[peer]
        self._history = {g: h for g, h in self._history.items() if g in self.groups}
        return gone

    def _member_of(self, group: str, name: str, connected: Collection[str]) -> str:
        """The peer that is the group's member of this name; it is connected, or was."""
        of_group = naming.joined(group, name)
        if of_group in connected or name in connected:
            return of_group if of_group in connected else name
        known = self.members.get(of_group)
        return name if known is None or known.gone is not None else of_group

    def left(self, now: float, peer: str, why: str) -> None:
        """Why a member has gone; "": not known."""
        if (member := self.members.get(peer)) is not None:
            member.left(why)
            self._event(now, "left" if member.closed else "gone", peer, member.groups, member.why)

    def connection(self, peer: str, path: str, latency: float | None, suspected: bool) -> None:
        """How the broker reaches a member."""
        if (member := self.members.get(peer)) is not None and member.gone is None:
            member.path, member.latency, member.suspected = path, latency, suspected

    def report(self, now: float, peer: str, text: str) -> None:
        """A member's report (moolink.rpc.report).

        Raises:
            ValueError: it has another form.
        """
        member = self.members.get(peer)
        if member is None or member.gone is not None:
            return
        last = report.read(text)
        before = member.last
        if before is not None and member.reported is not None and now > member.reported:
            elapsed = now - member.reported
            member.rates = {
                rate: max(0.0, total - before.totals[rate]) / elapsed
                for rate, total in last.totals.items()
                if rate in before.totals
            }
        member.progress = {
            (model.group, model.name, counter): member.progress.get(
                (model.group, model.name, counter), Growth(_LONG_WINDOW)
            )
            for model in last.models
            for counter in model.target
        }
        for model in last.models:
            for counter in model.target:
                total = model.totals.get(counter, 0.0)
                member.progress[model.group, model.name, counter].add(now, total)
        for group in member.groups:
            if group in last.steps:
                member.counted.setdefault(group, Growth()).add(now, last.steps[group])
        member.last, member.reported, member.why = last, now, ""

    def failed(self, peer: str, why: str) -> None:
        """A member gave no report."""
        if (member := self.members.get(peer)) is not None and member.gone is None:
            member.why = why

    def tick(self, now: float) -> None:
        """A second has passed: adds events and an entry to each history."""
        for member in self.members.values():
            state = member.state(now)
            if state in _WRONG and state != member.told:
                self._event(now, state, member.peer, member.groups, member.note(now))
            elif state == "up" and member.told in _WRONG:
                self._event(now, "recovered", member.peer, member.groups)
            member.told = state
        for group, peers in self.groups.items():
            there = [self.members[peer] for peer in peers.values()]
            here = [member.last for member in there if member.is_fresh(now) and member.last]
            returns = [value for last in here for value in last.returns]
            history = self._history.setdefault(group, collections.deque(maxlen=HISTORY))
            history.append(
                (
                    now,
                    _step_rate(there, group, now),
                    sum(one / len(returns) for one in returns) if returns else None,
                )
            )

    def _event(self, now: float, kind: str, peer: str, groups: list[str], why: str = "") -> None:
        group, name = naming.split(peer)
        told = {"time": now, "kind": kind, "member": name, "group": group, "groups": groups}
        self._events.append({**told, "why": why})

    # Output

    def families(self, others: Mapping[str, tuple[str, list[Family]]]) -> list[Family]:
        """The metrics of all present members and of other peers, labelled with `peer`, and with
        `peer_group` if the peer has shown a group's key.

        The metrics of a process count once, at the first of its peers.

        Args:
            others: by peer, the process's id and the metrics.
        """
        processes: set[str] = set()
        of_peers: dict[str, list[Family]] = {}
        for member in self.members.values():
            if member.gone is None and member.last is not None:
                of_peers[member.peer] = member.last.families(member.process not in processes)
                processes.add(member.process)
        for peer, (process, families) in others.items():
            there = process in processes
            of_peers[peer] = [f for f in families if not (there and report.is_of_process(f.name))]
        return _merged(of_peers)

    def snapshot(self, now: float) -> dict[str, Any]:
        """The job as the page shows it; docs/dashboard.md has the schema."""
        groups = [self._group(now, name, peers) for name, peers in self.groups.items()]
        leaders: set[str | None] = set()
        idle: set[str | None] = set()
        for group in groups:
            peers = self.groups[group["name"]]
            for model in group["models"]:
                leaders.add(peers.get(model["leader"]))
                idle.update(peers.get(name) for name in model["idle"])
        return {
            "time": now,
            "uptime": now - self.began,
            "groups": groups,
            "members": [
                self._member(now, member, member.peer in leaders, member.peer in idle)
                for member in self.members.values()
            ],
            "events": list(self._events),
        }

    def _group(self, now: float, name: str, peers: Mapping[str, str]) -> dict[str, Any]:
        there = [self.members[peer] for peer in peers.values()]
        models = {model.name for one in there for model in one.models if model.group == name}
        epochs = [one.last.epochs.get(name, 0) for one in there if one.last is not None]
        return {
            "name": name,
            "members": list(peers),
            "epoch": max(epochs, default=0),
            "scripts": _distinct(one.last.script for one in there if one.last is not None),
            "environments": _distinct(
                environment
                for one in there
                if one.last is not None
                for environment in one.last.environments
            ),
            "models": [self._model_of(now, name, model, there) for model in sorted(models)],
            "history": [list(point) for point in self._history.get(name, ())],
        }

    def _model_of(self, now: float, group: str, name: str, members: list[Member]) -> dict[str, Any]:
        told = {
            member.name: (member, model)
            for member in members
            for model in member.models
            if (model.group, model.name) == (group, name)
        }
        # A leader that hangs still reports itself as the leader, so ask the member that is ahead.
        member, ahead = max(told.values(), key=lambda one: _progress(now, group, *one))
        _, leader = told.get(ahead.leader, (None, None))
        if leader is None or leader.version + 2 < ahead.version:
            leader = ahead
        joined = {n: member.joined for n, (member, model) in told.items() if model.role != OBSERVER}
        recent = leader.rounds[-RECENT:]
        counts = {
            member: (
                sum(one.contributors.get(member, 0) for one in recent),
                sum(one.time >= since for one in recent),
            )
            for member, since in joined.items()
        }
        slowest = _slowest(counts)
        rounds = [
            {
                **one._asdict(),
                "slowest": None if slowest in (None, *one.contributors) else slowest,
            }
            for one in leader.rounds
        ]
        return {
            "name": name,
            "leader": ahead.leader,
            "version": ahead.version,
            "waiting_for": [one for one in leader.waiting_for if one != ahead.leader],
            "still": leader.still,
            "awaited": leader.awaited if leader.still > max(SILENT, 3 * leader.typical) else "",
            "rounds": rounds,
            "totals": ahead.totals,
            "target": ahead.target,
            "left": _left(ahead, member.progress),
            "contributions": {member: made for member, (made, _) in counts.items()},
            "slowest": slowest,
            "idle": [member for member, since in joined.items() if _is_idle(member, since, leader)],
        }

    def _member(self, now: float, member: Member, leads: bool, idle: bool) -> dict[str, Any]:
        last, fresh, state = member.last, member.is_fresh(now), member.state(now)
        is_idle = idle and state == "up"
        versions = [model.version for model in member.models]
        return {
            "name": member.name,
            "group": naming.split(member.peer)[0],
            "groups": member.groups,
            "host": member.host,
            "pid": member.pid,
            "role": "member" if member.role() == LEADER and not leads else member.role(),
            "state": "idle" if is_idle else state,
            "why": _IDLE if is_idle else member.note(now),
            "age": now - member.joined,
            "silent": None if member.reported is None else now - member.reported,
            "version": max(versions, default=None),
            "path": member.path,
            "latency": member.latency,
            "rates": member.rates if fresh else {},
            "memory": None if last is None else last.memory,
            "paths": [] if last is None else [list(path) for path in last.paths],
            "own": {} if last is None else last.values,
            "script": "" if last is None else last.script,
        }


def _left(model: Model, progress: Mapping[tuple[str, str, str], Growth]) -> float | None:
    """The seconds until a model's totals reach its target; None: not known."""
    times = []
    for counter, target in model.target.items():
        missing = target - model.totals.get(counter, 0.0)
        if missing <= 0:
            return 0.0
        growth = progress.get((model.group, model.name, counter))
        if growth is not None and (rate := growth.rate()) > 0:
            times.append(missing / rate)
    return min(times, default=None)


def _distinct(texts: Iterable[str]) -> list[str]:
    """The first few different texts."""
    return list(dict.fromkeys(text for text in texts if text))[:MOST_SCRIPTS]


def _merged(of_peers: Mapping[str, list[Family]]) -> list[Family]:
    """One family for each name, whose samples have the labels of their peer. moolink's own metrics
    keep their kind; else the first peer that reports a name determines it. Each sample counts
    once."""
    found: dict[tuple[str, str], tuple[Family, dict[frozenset[tuple[str, str]], Sample]]] = {}
    taken: dict[str, tuple[str, str]] = {}
    reported = [(peer, family) for peer, families in of_peers.items() for family in families]
    for peer, family in sorted(reported, key=lambda one: one[1].name not in BY_NAME):
        base = family.name.removesuffix("_total") if family.kind == "counter" else family.name
        key, names = (base, family.kind), exposed(family.name, family.kind)
        if any(taken.setdefault(name, key) != key for name in names):
            continue
        _, samples = found.setdefault(key, (family, {}))
        for sample in family.samples:
            labels = {**sample.labels, **_labels(peer)}
            samples.setdefault(frozenset(labels.items()), Sample(labels, sample.value))
    return [family._replace(samples=list(samples.values())) for family, samples in found.values()]


def _labels(peer: str) -> dict[str, str]:
    group, name = naming.split(peer)
    return {"peer": name, "peer_group": group} if group else {"peer": name}


def _step_rate(members: list[Member], group: str, now: float) -> float:
    """Environment steps per second of a group: by the counter "steps" of its rounds, which each
    member sums for the whole group, or else by the pools of the members' processes."""
    here = [member for member in members if member.is_fresh(now)]
    counted = [member.counted[group].rate() for member in here if group in member.counted]
    if counted:
        return max(counted)
    processes: dict[str, float] = {}
    for member in here:
        rate = member.rates.get("steps", 0.0)
        processes[member.process] = max(rate, processes.get(member.process, 0.0))
    return sum(processes.values())


def _progress(now: float, group: str, member: Member, model: Model) -> tuple[Any, ...]:
    """The sort key of a member's progress."""
    epoch = 0 if member.last is None else member.last.epochs.get(group, 0)
    return member.is_fresh(now), epoch, model.version, model.role == LEADER


def _is_idle(member: str, joined: float, leader: Model) -> bool:
    """Whether the rounds of the last seconds contain no contribution of a member."""
    if not leader.rounds:
        return False
    since = leader.rounds[-1].time - IDLE
    recent = [one for one in leader.rounds if one.time >= since]
    known = leader.rounds[0].time <= since and joined <= since and len(recent) >= FEW_ROUNDS
    return known and not any(member in one.contributors for one in recent)


def _slowest(counts: Mapping[str, tuple[int, int]]) -> str | None:
    """The member that made less than half of the median number of contributions, or None.

    Args:
        counts: by member, its contributions and the rounds that it could contribute to.
    """
    shares = {name: made / of for name, (made, of) in counts.items() if of >= FEW_ROUNDS}
    if len(shares) < 2:
        return None
    last = min(shares, key=lambda member: shares[member])
    others = statistics.median(share for name, share in shares.items() if name != last)
    return last if shares[last] < others / 2 else None
