"""Which process runs on which host, with which cores and GPUs."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from moolink.launch import Job, Role
from moolink.launch.host import Host, HostWatcher, JobError, Running, Task
from moolink.launch.shares import parse_hosts, seats_of, share_out


class FakeHost(Host):
    """A host that has something, and runs nothing."""

    def __init__(self, label: str, cores: int = 4, gpus: int = 0) -> None:
        self.label, self.cores, self.is_up = label, cores, True
        self.gpus = [str(number) for number in range(gpus)]

    def start(self, task: Task, watcher: HostWatcher) -> Running | None:
        raise NotImplementedError

    def note(self, notes: Mapping[str, str]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    @property
    def is_closed(self) -> bool:
        return True

    @property
    def notes(self) -> Mapping[str, str]:
        return {}


def seated(job: Job, given: list[str]) -> list[tuple[str, int, str]]:
    names = {"a", "b", "me@c"}
    seats = seats_of(job, given, {name: FakeHost(name) for name in names})
    return [(seat.role.name, seat.index, seat.host.label) for seat in seats]


@pytest.mark.parametrize(
    ("text", "target", "count"),
    [
        ("a", "a", None),
        ("a:2", "a", 2),
        ("me@a.b-c:12", "me@a.b-c", 12),
        ("[::1]:2", "[::1]", 2),
        ("me@[fe80::1%eth0]", "me@[fe80::1%eth0]", None),
    ],
)
def test_hosts_are_read(text: str, target: str, count: int | None) -> None:
    (share,) = parse_hosts([text], "hosts")
    assert (share.target, share.count) == (target, count)


@pytest.mark.parametrize("text", ["", ":2", "a:0", "a:b", "a b", "-oProxyCommand=x", "a@-b", "a,b"])
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        parse_hosts([text], "hosts")


def test_hosts_are_filled_in_turn_or_evenly() -> None:
    job = Job("j", [Role("x", ["x"], 1), Role("y", ["y"], 3)])
    assert seated(job, ["a:2", "b:2"]) == [
        ("x", 0, "a"), ("y", 0, "a"), ("y", 1, "b"), ("y", 2, "b"),
    ]  # fmt: skip
    assert seated(job, ["a", "b"]) == [
        ("x", 0, "a"), ("y", 0, "a"), ("y", 1, "a"), ("y", 2, "b"),
    ]  # fmt: skip


def test_a_role_has_hosts_of_its_own() -> None:
    job = Job("j", [Role("x", ["x"], 2, hosts=["me@c"]), Role("y", ["y"], 1)])
    assert seated(job, ["a"]) == [("x", 0, "me@c"), ("x", 1, "me@c"), ("y", 0, "a")]


def test_too_few_hosts_are_refused() -> None:
    job = Job("j", [Role("x", ["x"], 1), Role("y", ["y"], 3)])
    with pytest.raises(ValueError, match="role 'y': count is 3, but the hosts take 1 more"):
        seated(job, ["a:1", "b:1"])
    with pytest.raises(ValueError, match="role 'x': hosts are missing"):
        seated(job, [])
    with pytest.raises(ValueError, match="give all of the hosts a count, or none"):
        seated(job, ["a:1", "b"])


def test_cores_are_shared_by_those_that_ask_for_none() -> None:
    a, b = FakeHost("a", cores=7), FakeHost("b", cores=1)
    job = Job("j", [Role("x", ["x"], 2, cores=2), Role("y", ["y"], 4, hosts=["a:2", "b:2"])])
    seats = seats_of(job, ["a"], {"a": a, "b": b})
    share_out(seats)
    assert [seat.cores for seat in seats] == [2, 2, 2, 1, 1, 1]
    assert {seat.gpus is None for seat in seats} == {True}, "nobody asked for any"


def test_gpus_are_each_ones_own() -> None:
    job = Job("j", [Role("x", ["x"], 2, gpus=2), Role("y", ["y"])])
    seats = seats_of(job, ["a"], {"a": FakeHost("a", gpus=4)})
    share_out(seats)
    assert [seat.gpus for seat in seats] == [["0", "1"], ["2", "3"], []]
    with pytest.raises(JobError, match="role 'x': gpus is 2, but a has 3 in all"):
        share_out(seats_of(job, ["a"], {"a": FakeHost("a", gpus=3)}))
