"""The dashboard over HTTP: what it tells, and whom."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import moolink
from moolink import tokens
from moolink.dashboard.access import Access
from moolink.dashboard.server import Dashboard
from moolink.rpc.report import _environments
from tests import waiting
from tests.dashboard.dashboards import NotLocal, Served, get
from tests.waiting import PROCESS_LIMIT


def test_members_and_what_befalls_them(served: Served) -> None:
    assert served.job()["groups"] == []
    served.join("a")
    leaving = served.join("b")
    served.wait_for({"a": "up", "b": "up"})
    job = served.job()
    (group,) = job["groups"]
    assert (group["name"], sorted(group["members"])) == ("g", ["a", "b"])
    a = next(member for member in job["members"] if member["name"] == "a")
    assert a["groups"] == ["g"]
    assert a["path"] == "shm"
    assert ["broker", "shm"] in [path[:2] for path in a["paths"]]
    assert a["memory"] > 1e6
    leaving.close()
    waiting.until(lambda: served.job()["groups"][0]["members"] == ["a"], "the group without b", 0.1)
    leaving.rpc.close()
    served.wait_for({"a": "up", "b": "left"})
    kinds = [(e["kind"], e["member"]) for e in served.job()["events"] if "g" in e["groups"]]
    assert sorted(kinds[:2]) == [("joined", "a"), ("joined", "b")]
    assert kinds[2:] == [("left", "b")]
    last = served.job()["events"][-1]
    assert (last["kind"], last["member"], last["groups"]) == ("left", "b", [])


def test_a_peer_needs_no_group(served: Served) -> None:
    with moolink.Rpc("actor") as actor:
        actor.connect(served.address)
        served.wait_for({"actor": "up"})
        assert served.job()["members"][0]["groups"] == []
    served.wait_for({"actor": "left"})


def test_environments_of_other_libraries_are_told_too() -> None:
    envs = moolink.drive(gymnasium.make_vec("CartPole-v1", 2))
    with moolink.Rpc() as rpc:
        assert "CartPole-v1" in _environments(rpc)
    envs.close()


SCRIPT = """
import functools, sys
import gymnasium
import moolink

if __name__ == "__main__":
    make = functools.partial(gymnasium.make, "CartPole-v1")
    with moolink.Rpc("m") as rpc, moolink.env_pool.EnvPool(make, 1, 1) as environments:
        rpc.connect(sys.argv[2])
        with moolink.Group(rpc, "g"):
            sys.stdin.read()
"""


def test_a_member_tells_its_script_and_its_environments(served: Served, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), "--broker", served.address]
    member = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        served.wait_for({"m": "up"})
        waiting.until(lambda: served.job()["groups"] != [], "the group", 0.1)
        (group,) = served.job()["groups"]
    finally:
        member.communicate()
    assert member.returncode == 0
    assert group["scripts"] == [f"train.py --broker {served.address}"], "no path, no variables"
    assert group["environments"] == ["CartPole-v1"]


def test_metrics_for_prometheus(served: Served) -> None:
    moolink.metrics.gauge("dashboard_test").set(2.5)
    group = served.join("a")
    waiting.until(group.update, "the first view")
    waiting.until(
        lambda: 'moolink_group_members{group="g",peer="a"} 1.0' in get(f"{served.url}/metrics")[1],
        "a report of a that is younger than its view",
    )
    status, text = get(f"{served.url}/metrics")
    assert status == 200
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert ("moolink_group_members", {"group": "g", "peer": "a"}, 1.0) in [s[:3] for s in samples]
    assert ("dashboard_test", {"peer": "a"}, 2.5) in [s[:3] for s in samples]
    assert any(s.name == "moolink_peers" and s.labels == {"peer": "broker"} for s in samples)


def test_the_stream_tells_of_each_turn(served: Served) -> None:
    served.join("a")
    connection = http.client.HTTPConnection(served.dashboard.address, timeout=waiting.TIMEOUT)
    connection.request("GET", "/api/v1/stream")
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    times = []
    while len(times) < 3:
        line = answer.readline()
        if line.startswith(b"data: "):
            times.append(json.loads(line[6:])["time"])
    assert times == sorted(set(times))
    connection.close()


def test_why_a_path_is_used(served: Served) -> None:
    served.join("a")
    served.wait_for({"a": "up"})
    told = json.loads(get(f"{served.url}/api/v1/explain?member=a&peer=broker")[1])
    assert told["connected"]
    assert [path["path"] for path in told["paths"]]
    status, text = get(f"{served.url}/api/v1/explain?member=nobody&peer=broker")
    assert status == 404
    assert "nobody" in json.loads(text)["error"]


def test_members_of_one_name_in_two_groups(guarded: Served) -> None:
    def rows() -> dict[tuple[str, str], str]:
        return {(m["group"], m["name"]): m["state"] for m in guarded.job()["members"]}

    peers = {group: guarded.join("x", group).rpc for group in "ab"}
    waiting.until(lambda: rows() == {("a", "x"): "up", ("b", "x"): "up"}, "two rows", 0.1)
    job = guarded.job()
    assert [(group["name"], group["members"]) for group in job["groups"]] == [
        ("a", ["x"]),
        ("b", ["x"]),
    ]
    assert sorted(member["groups"] for member in job["members"]) == [["a"], ["b"]]
    events = [(event["kind"], event["group"], event["member"]) for event in job["events"]]
    assert sorted(set(events)) == [("joined", "a", "x"), ("joined", "b", "x")]
    # Each answers for itself: only one of them knows this peer.
    peers["b"].listen("127.0.0.1:0")
    with moolink.Rpc("friend", token=guarded.token and guarded.token.of_group("b")) as friend:
        friend.connect(peers["b"].addresses()[0])
        waiting.until(lambda: len(friend.peers()) == 1, "the friend's connection")
        for group, connected in (("a", False), ("b", True)):
            query = f"member=x&group={group}&peer=friend&peer_group={group}"
            told = json.loads(get(f"{guarded.url}/api/v1/explain?{query}")[1])
            assert told["connected"] == connected
    assert get(f"{guarded.url}/api/v1/explain?member=x&group=c&peer=broker")[0] == 404
    status, text = get(f"{guarded.url}/api/v1/explain?member=x&peer=broker")
    assert (status, "there is no member 'x'" in text) == (404, True)
    _, text = get(f"{guarded.url}/metrics")
    labels = [
        sample.labels
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "moolink_group_members"
    ]
    assert sorted((of["peer"], of["peer_group"], of["group"]) for of in labels) == [
        ("x", "a", "a"),
        ("x", "b", "b"),
    ]
    with moolink.Rpc("x", token=guarded.token) as third:
        third.connect(guarded.address)
        waiting.until(lambda: rows().get(("", "x")) == "up", "the third row", 0.1)
        peers["a"].close()
        waiting.until(lambda: rows()["a", "x"] in ("left", "gone"), "the end of one", 0.1)
    waiting.until(lambda: rows()["", "x"] in ("left", "gone"), "the end of another", 0.1)
    assert rows()["b", "x"] == "up"
    # The connection of a namesake gives no reason for their ends.
    ends = [member["why"] for member in guarded.job()["members"] if member["state"] == "gone"]
    assert set(ends) <= {"the reason is unknown: another peer has its name"}


def test_a_member_that_reports_nonsense_is_shown_as_silent(served: Served) -> None:
    group = served.join("a")
    group.rpc.undefine("moolink.metrics/report")
    group.rpc.define("moolink.metrics/report", lambda: np.zeros(3))
    served.wait_for({"a": "silent"})
    (member,) = served.job()["members"]
    assert "another form" in member["why"]


def test_pages_of_other_sites_cannot_read_it(served: Served) -> None:
    assert get(f"{served.url}/api/v1/job", Host="evil.example")[0] == 403
    assert get(f"{served.url}/api/v1/job", Host="localhost:1")[0] == 200
    assert get(f"{served.url}/api/v1/job", Host="[::1]:80")[0] == 200
    assert get(f"{served.url}/api/v1/job", Host="127.0.0.2")[0] == 200
    assert get(f"{served.url}/api/v1/job", Host="127.0.0.1.evil.example")[0] == 403
    with urllib.request.urlopen(served.url) as answer:
        policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'self'")


@pytest.mark.parametrize("path", ["/nothing", "/page/index.html", "/../server.py", "/app.js/x"])
def test_there_is_nothing_else(served: Served, path: str) -> None:
    assert get(served.url + path)[0] == 404


def test_elsewhere_it_asks_for_its_key() -> None:
    of = NotLocal()
    try:
        for path in ("/api/v1/job", "/api/v1/stream", "/metrics", "/app.js", "/api/v1/explain"):
            assert get(of.url + path)[0] == 401, path
            assert get(of.url + path, Authorization="Bearer wrong")[0] == 401, path
        assert "dashboard" in get(of.url + "/metrics")[1], "it says how to get the key"
        assert get(of.url + "/api/v1/job", Authorization=f"Bearer {of.key}")[0] == 200
        assert 'name="key"' in get(of.url)[1], "a browser gets to the form"

        def send(key: str) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(of.url.partition("//")[2], timeout=20)
            form = urllib.parse.urlencode({"key": key})
            kind = {"Content-Type": "application/x-www-form-urlencoded"}
            connection.request("POST", "/login", form, kind)
            return connection.getresponse()

        assert send("wrong").headers["Location"] == "/login?wrong"
        answer = send(of.key)
        assert answer.headers["Location"] == "/"
        cookie = answer.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        assert get(of.url + "/api/v1/job", Cookie=cookie.partition(";")[0])[0] == 200
    finally:
        of.dashboard.close()
        of.broker.close()


def test_without_a_token_it_is_for_this_machine_only() -> None:
    with moolink.Broker(first=True) as broker:
        with pytest.raises(ValueError, match="without a token any process could read"):
            Dashboard(broker, "0.0.0.0:0", None)
        with pytest.raises(ValueError, match="HOST:PORT"):
            Dashboard(broker, "localhost", None)


@pytest.mark.parametrize("address", ["4480", ":4480", "127.0.0.1:65536", "127.0.0.1:x"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with moolink.Broker(first=True) as broker, pytest.raises(ValueError, match="HOST:PORT"):
        Dashboard(broker, address, None)


def test_a_form_of_another_kind_is_refused() -> None:
    of = NotLocal()
    try:
        for kind in ("application/x-www-form-urlencoded; charset=nope", "multipart/form-data"):
            connection = http.client.HTTPConnection(of.url.partition("//")[2], timeout=20)
            connection.request("POST", "/login", b"key=\xff", {"Content-Type": kind})
            assert connection.getresponse().status in (303, 400)
    finally:
        of.dashboard.close()
        of.dashboard.close()
        of.broker.close()


def test_pages_of_other_sites_cannot_have_paths_explained(served: Served) -> None:
    url = f"{served.url}/api/v1/explain?member=a&peer=b"
    assert get(url, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
    assert get(url, **{"Sec-Fetch-Site": "same-origin"})[0] == 404


def test_metrics_do_not_wait_for_explanations(served: Served) -> None:
    group, hold = served.join("a"), threading.Event()
    served.wait_for({"a": "up"})
    group.rpc.undefine("moolink.metrics/explain")
    group.rpc.define("moolink.metrics/explain", lambda peer: hold.wait(60) and None)
    url = f"{served.url}/api/v1/explain?member=a&peer=broker"
    askers = [threading.Thread(target=get, args=[url]) for _ in range(12)]
    for asker in askers:
        asker.start()
    try:
        assert get(f"{served.url}/metrics")[0] == 200
        assert not hold.is_set()
    finally:
        hold.set()
        for asker in askers:
            asker.join()


def test_the_key_does_not_give_the_token_away() -> None:
    token = tokens.new()
    assert token.dashboard() not in token.text()
    assert token.dashboard() == tokens.Key(token.secret).dashboard()
    assert token.dashboard() != token.of_group("g").dashboard()
    access = Access(token.dashboard())
    assert not access.accepts("", "")
    assert not access.accepts("Bearer é", "")
    assert not access.accepts(f"Bearer {token.text()}", "")
    assert access.accepts(f"Bearer {token.dashboard()}", "")
    assert access.accepts(f"bearer {token.dashboard()}", "")


def run_broker(*arguments: str, pass_fds: Sequence[int] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "moolink.broker", "127.0.0.1:0", "--first", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        pass_fds=pass_fds,
    )


def test_the_executable(tmp_path: Path) -> None:
    broker = run_broker("--http", "127.0.0.1:0")
    assert broker.stdout is not None
    url = next(line.split()[-1] for line in broker.stdout if line.startswith("dashboard"))
    assert get(f"{url}/healthz") == (200, "ok\n")
    top = [sys.executable, "-m", "moolink", "top", url, "--once"]
    shown = subprocess.run(top, capture_output=True, text=True, timeout=PROCESS_LIMIT, check=True)
    assert "0 members" in shown.stdout
    told = subprocess.run(
        [*top, "--json"], capture_output=True, text=True, timeout=PROCESS_LIMIT, check=True
    )
    assert json.loads(told.stdout)["groups"] == []
    broker.terminate()
    assert broker.wait(20) == 0
    failed = subprocess.run(top, capture_output=True, text=True, timeout=PROCESS_LIMIT, check=False)
    assert failed.returncode == 1
    assert "moolink-broker --http" in failed.stderr


def test_the_token_is_read_once(tmp_path: Path) -> None:
    """It may come through a pipe, which has it once."""
    token = tokens.new()
    reading, writing = os.pipe()
    os.write(writing, token.text().encode())
    os.close(writing)
    arguments = ("--token-file", f"/dev/fd/{reading}", "--http", "0.0.0.0:0")
    broker = run_broker(*arguments, pass_fds=[reading])
    try:
        os.close(reading)
        assert broker.stdout is not None
        lines = []
        for line in broker.stdout:
            lines.append(line)
            if line.startswith(("dashboard on", "moolink-broker: ")):
                break
        assert lines[-1].startswith("dashboard on"), lines
        port = lines[-1].rpartition(":")[2].strip()
        url = f"http://127.0.0.1:{port}/api/v1/job"
        assert get(url, Authorization=f"Bearer {token.dashboard()}")[0] == 200
    finally:
        broker.kill()
        broker.communicate()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        broker = run_broker("--http", address)
        output, _ = broker.communicate(timeout=PROCESS_LIMIT)
    assert broker.returncode == 1
    assert f"no dashboard on {address}" in output
