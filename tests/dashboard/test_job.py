"""What the dashboard makes of views and reports."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from moolink import in_group
from moolink.dashboard import prometheus
from moolink.dashboard.job import GONE, SILENT, Job
from moolink.dashboard.report import MOST_BYTES, read
from moolink.metrics.family import Family, Sample

PHASES = (0.02, 0.01, 0.0)  # gather, reduce, deliver


def told(
    steps: int = 0, models: list[dict[str, Any]] | None = None, **own: float
) -> dict[str, Any]:
    return {
        "host": "h",
        "pid": 7,
        "process": "7",
        "metrics": {
            "moolink_environment_steps_total": [({"pool": "0"}, steps)],
            "moolink_group_epoch": [({"group": "g"}, 3)],
        },
        "own": [(name, "gauge", "", [({}, value)]) for name, value in own.items()],
        "paths": [("b", "shm", 1e-5, "")],
        "models": models or [],
    }


def report(steps: int = 0, models: list[dict[str, Any]] | None = None, **own: float) -> str:
    return json.dumps(told(steps, models, **own))


def model(
    role: str, version: int = 5, rounds: list[dict[str, int]] | None = None
) -> dict[str, Any]:
    return {
        "group": "g",
        "name": "m",
        "role": role,
        "leader": "a",
        "version": version,
        "waiting_for": [],
        "idle": 0.0,
        "still": 0.1,
        "awaited": "",
        "typical": 0.1,
        "rounds": [(i, 1.0, 0.1, 8, 0, peers, *PHASES) for i, peers in enumerate(rounds or [])],
    }


def members(job: Job, now: float) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in job.snapshot(now)["members"]}


def test_states_of_a_member() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    assert members(job, 1)["a"]["state"] == "new"
    assert members(job, SILENT + 1)["a"]["state"] == "silent"
    job.report(10, "a", report())
    assert members(job, 11)["a"]["state"] == "up"
    job.connection("a", "tcp", 0.001, True)
    assert members(job, 11)["a"]["state"] == "suspected"
    job.connection("a", "tcp", 0.001, False)
    job.failed("a", "it hangs")
    late = members(job, 10 + SILENT + 1)["a"]
    assert (late["state"], late["why"]) == ("silent", "it hangs")
    assert job.view(20, {"g": []}) == ["a"]
    job.left(20, "a", "killed")
    gone = members(job, 21)["a"]
    assert (gone["state"], gone["why"]) == (
        "gone",
        "its process was killed or crashed, or its host is down: killed",
    )
    assert job.view(21, {}) == []
    job.view(20 + GONE + 1, {})
    assert members(job, 100) == {}
    kinds = [(event["kind"], event["why"]) for event in job.snapshot(100)["events"]]
    assert kinds == [("joined", ""), ("gone", gone["why"])]


def test_a_member_that_comes_back_is_new() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report(steps=500))
    job.view(2, {})
    job.view(3, {"g": ["a"]})
    job.report(4, "a", report(steps=10))
    assert members(job, 4)["a"]["rates"] == {}, "there is nothing to compare with"
    job.report(6, "a", report(steps=30))
    assert members(job, 6)["a"]["rates"]["steps"] == 10


def test_peers_without_a_group() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]}, ["a", "actor"])
    job.report(1, "actor", report(steps=1))
    shown = job.snapshot(1)
    assert {m["name"]: m["groups"] for m in shown["members"]} == {"a": ["g"], "actor": []}
    assert [group["members"] for group in shown["groups"]] == [["a"]]
    assert job.view(2, {"g": ["a"]}, ["a"]) == ["actor"]


def test_members_of_one_name_in_two_groups() -> None:
    of_a, of_b = in_group("a", "x"), in_group("b", "x")
    job = Job(0)
    assert job.view(0, {"a": ["x"], "b": ["x"], "c": ["x"]}, [of_a, of_b, "x"]) == []
    for steps, peer in enumerate((of_a, of_b, "x"), start=1):
        one = model("leader") | {"group": "a" if peer == of_a else "b", "leader": "x"}
        job.report(1, peer, json.dumps(told(steps, [one]) | {"process": peer}))
    job.connection(of_a, "tcp", 0.001, True)
    shown = job.snapshot(2)
    assert [(m["group"], m["name"], m["groups"]) for m in shown["members"]] == [
        ("a", "x", ["a"]),
        ("b", "x", ["b"]),
        ("", "x", ["c"]),
    ]
    assert [m["state"] for m in shown["members"]] == ["suspected", "up", "up"]
    # The last one is not the leader of b, whose name it has.
    assert [m["role"] for m in shown["members"]] == ["leader", "leader", "member"]
    assert [group["members"] for group in shown["groups"]] == [["x"], ["x"], ["x"]]
    assert [len(group["models"]) for group in shown["groups"]] == [1, 1, 0]
    families = {family.name: family.samples for family in job.families({})}
    assert families["moolink_environment_steps_total"] == [
        ({"pool": "0", "peer": "x", "peer_group": "a"}, 1),
        ({"pool": "0", "peer": "x", "peer_group": "b"}, 2),
        ({"pool": "0", "peer": "x"}, 3),
    ]
    # While its connection is lost, it is still the one that is in the view.
    assert job.view(3, {"a": ["x"], "b": ["x"]}, [of_b]) == ["x"]
    assert job.view(4, {"b": ["x"]}, [of_b]) == [of_a]
    job.left(4, of_a, "killed")
    assert [m["state"] for m in job.snapshot(4)["members"]] == ["gone", "up", "gone"]
    last = job.snapshot(4)["events"][-1]
    assert (last["kind"], last["group"], last["member"]) == ("gone", "a", "x")
    # Another one of the name, which holds the token, has taken its place in the group.
    job.view(5, {"b": ["x"]}, [of_b])
    assert job.view(6, {"b": ["x"]}, ["x"]) == [of_b]


def test_histories() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b"]})
    for now in (1, 2):
        job.report(now, "a", report(steps=100 * now, mean_return=1.0))
        job.report(now, "b", report(steps=50 * now, mean_return=3.0))
        job.tick(now)
    (group,) = job.snapshot(2)["groups"]
    # Both are of one process, so that they report the same pool.
    assert group["history"] == [[1, 0, 2.0], [2, 100, 2.0]]
    assert group["epoch"] == 3
    job.report(3, "b", json.dumps(told(steps=200) | {"process": "8"}))
    job.report(3, "a", report(steps=300))
    job.tick(3)
    assert job.snapshot(3)["groups"][0]["history"][-1][1] == 200


def test_what_a_silent_member_did_last_is_not_what_it_does() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    for now in (1, 2):
        job.report(now, "a", report(steps=100 * now, mean_return=1.0))
    job.tick(2)
    assert job.snapshot(2)["groups"][0]["history"] == [[2, 100, 1.0]]
    later = 2 + SILENT + 1
    job.tick(later)
    assert job.snapshot(later)["groups"][0]["history"][-1] == [later, 0, None]
    assert members(job, later)["a"]["rates"] == {}


def test_steps_of_rounds_that_take_seconds() -> None:
    """The counter grows once a round, which is no reason to show 0 and then much."""
    job = Job(0)
    job.view(0, {"g": ["a"]})
    for now in range(1, 31):
        counter = [({"group": "g", "name": "m", "counter": "steps"}, 1000 * (now // 5))]
        metrics = told(steps=7 * now)["metrics"] | {"moolink_counter": counter}
        job.report(now, "a", json.dumps(told() | {"metrics": metrics}))
        job.tick(now)
    rates = [steps for _, steps, _ in job.snapshot(30)["groups"][0]["history"]]
    assert rates[11:] == [200] * 19


def test_the_slowest_member() -> None:
    """By contributions: it is in most rounds, and the others make several in each."""
    job = Job(0)
    job.view(0, {"g": ["a", "b", "c"]})
    rounds = [
        {"a": 3, "b": 3, "c": 1},
        {"a": 3, "b": 3},
        {"a": 3, "b": 3},
        {"a": 2, "b": 3, "c": 1},
    ]
    job.report(1, "a", report(models=[model("leader", rounds=rounds)]))
    for name in "bc":
        job.report(1, name, report(models=[model("member")]))
    (shown,) = job.snapshot(1)["groups"][0]["models"]
    assert shown["contributions"] == {"a": 11, "b": 12, "c": 2}
    assert shown["slowest"] == "c"
    assert [one["slowest"] for one in shown["rounds"]] == [None, "c", "c", None]
    assert shown["rounds"][0]["contributors"] == {"a": 3, "b": 3, "c": 1}
    assert shown["rounds"][0]["reduce"] == PHASES[1]
    assert members(job, 1)["c"]["state"] == "up"
    job.report(2, "c", report(models=[model("observer")]))
    (shown,) = job.snapshot(2)["groups"][0]["models"]
    assert shown["slowest"] is None, "an observer contributes nothing"


def test_a_member_that_contributes_nothing() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b", "c"]})

    def states(seconds: int) -> list[str]:
        """After rounds of a second, of which c has contributed to the first two."""
        both = {"a": 1, "b": 1}
        made = [both | {"c": 1} if i < 2 else both for i in range(seconds)]
        rounds = [(i, 1.0 + i, 1.0, 8, 0, by, *PHASES) for i, by in enumerate(made)]
        job.report(seconds, "a", report(models=[model("leader") | {"rounds": rounds}]))
        for name in "bc":
            job.report(seconds, name, report(models=[model("member")]))
        found = members(job, seconds)
        assert ("must call step.reduce()" in found["c"]["why"]) == (found["c"]["state"] == "idle")
        return [found[name]["state"] for name in "abc"]

    assert states(8) == ["up", "up", "up"], "it may be one that takes long"
    assert states(12) == ["up", "up", "up"]
    assert states(13) == ["up", "up", "idle"]


def test_why_a_member_has_gone() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report())
    job.connection("a", "tcp", 0.001, True)
    assert "`ps -o stat 7` on h shows T" in members(job, 1)["a"]["why"]
    job.view(2, {})
    job.left(2, "a", "it is not known to any connected peer")
    assert "its process is stopped, or its host" in members(job, 2)["a"]["why"]


def test_a_normal_end_is_no_loss() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report())
    job.view(2, {})
    job.left(2, "a", "lost: it was closed (last known 0.3 s ago)")
    shown = members(job, 3)["a"]
    assert (shown["state"], shown["why"]) == ("left", "")
    assert job.snapshot(3)["events"][-1] | {"time": 0} == {
        "time": 0,
        "kind": "left",
        "member": "a",
        "group": "",
        "groups": ["g"],
        "why": "",
    }


def test_steps_of_a_member_without_moolinks_pool() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    for second, steps in ((1, 100), (2, 250)):
        one = told()
        labels = {"group": "g", "name": "m", "counter": "steps"}
        one["metrics"] = {"moolink_own_counter": [(labels, steps)]}
        job.report(second, "a", json.dumps(one))
    assert members(job, 2)["a"]["rates"] == {"steps": 150}


def test_totals_and_the_time_that_is_left() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    for second, steps in ((1, 1000), (2, 1500), (3, 2000)):
        one = model("leader") | {"totals": {"steps": steps, "x": 10**30}, "target": {"steps": 7000}}
        job.report(second, "a", report(models=[one]))
    (shown,) = job.snapshot(3)["groups"][0]["models"]
    assert (shown["totals"]["steps"], shown["target"], shown["left"]) == (2000, {"steps": 7000}, 10)
    assert shown["totals"]["x"] == 2.0**63, "sums have more bits than a report's numbers"
    done = model("leader") | {"totals": {"steps": 7000}, "target": {"steps": 7000}}
    job.report(4, "a", report(models=[done]))
    assert job.snapshot(4)["groups"][0]["models"][0]["left"] == 0


def test_scripts_and_environments_of_a_group() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b"]})
    for name in ("a", "b"):
        more = {"script": "train.py --lr 1", "environments": ["CartPole-v1"]}
        job.report(1, name, json.dumps(told() | more))
    (group,) = job.snapshot(1)["groups"]
    assert group["scripts"] == ["train.py --lr 1"]
    assert group["environments"] == ["CartPole-v1"]


def test_a_member_that_has_just_joined_is_not_the_slowest() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b"]})
    job.view(2, {"g": ["a", "b", "new"]})
    job.report(3, "a", report(models=[model("leader", rounds=[{"a": 1, "b": 1}] * 20)]))
    for name in ("b", "new"):
        job.report(3, name, report(models=[model("member")]))
    (shown,) = job.snapshot(3)["groups"][0]["models"]
    assert shown["slowest"] is None, "all rounds were before it came"


def test_a_leader_that_hangs_still_takes_itself_for_one() -> None:
    job = Job(0)
    job.view(0, {"g": ["old", "new", "third"]})
    for name, version in (("old", 5), ("new", 30), ("third", 30)):
        role = "member" if name == "third" else "leader"
        one = model(role, version, [{"new": 1, "third": 1}] * 6) | {
            "leader": "old" if name == "old" else "new",
            "idle": 42.0 if name == "old" else 0.0,
            "still": 42.0 if name == "old" else 0.1,
        }
        job.report(50, name, report(models=[one | ({} if role == "leader" else {"rounds": []})]))
    (shown,) = job.snapshot(50)["groups"][0]["models"]
    assert (shown["leader"], shown["version"], len(shown["rounds"])) == ("new", 30, 6)
    found = members(job, 50)
    assert {name: m["role"] for name, m in found.items()} == {
        "old": "member",
        "new": "leader",
        "third": "member",
    }
    assert found["old"]["state"] == "stuck"
    assert "its loop has not called moolink for 42 s, with 0% of a core" in found["old"]["why"]
    assert "`py-spy dump --pid 7` on h shows where" in found["old"]["why"]
    job.tick(50)
    job.report(51, "old", report(models=[model("member", 31)]))
    job.tick(51)
    kinds = [(event["kind"], event["member"]) for event in job.snapshot(51)["events"]]
    assert kinds[3:] == [("stuck", "old"), ("recovered", "old")]


def test_an_observer_may_take_its_time() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report(models=[model("observer") | {"idle": 600.0}]))
    assert members(job, 1)["a"]["state"] == "up"


def test_what_is_kept_of_a_member_that_has_gone() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report(models=[model("leader")], mean_return=1.0))
    job.view(2, {})
    gone = members(job, 3)["a"]
    assert (gone["host"], gone["pid"], gone["own"], gone["paths"]) == ("h", 7, {}, [])


def test_returns_of_any_size() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b"]})
    for name in "ab":
        job.report(1, name, report(mean_return=1.7e308))
    job.tick(1)
    json.dumps(job.snapshot(1), allow_nan=False)


def test_a_job_that_waits_says_for_what() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    one = model("leader") | {"still": 60.0, "awaited": "contributions: none of 'b'"}
    job.report(1, "a", report(models=[one | {"waiting_for": ["a", "b"]}]))
    (shown,) = job.snapshot(1)["groups"][0]["models"]
    assert shown["awaited"] == "contributions: none of 'b'"
    assert shown["waiting_for"] == ["b"], "the leader does not wait for itself"
    job.report(2, "a", report(models=[one | {"typical": 30.0}]))
    (shown,) = job.snapshot(2)["groups"][0]["models"]
    assert shown["awaited"] == "", "its rounds take that long"


def test_metrics_of_all_members() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b"]})
    job.report(1, "a", report(steps=1, mean_return=1.0))
    other = told(steps=2)
    other["own"] = [("mean_return", "counter", "", [({}, 9)])]
    job.report(1, "b", json.dumps(other | {"process": "8"}))
    families = {family.name: family for family in job.families({"broker": ("9", [])})}
    steps = families["moolink_environment_steps_total"]
    assert steps.samples == [({"pool": "0", "peer": "a"}, 1), ({"pool": "0", "peer": "b"}, 2)]
    # Two members may not give one name to metrics of different kinds: the first one counts.
    assert families["mean_return"].samples == [({"peer": "a"}, 1)]


@pytest.mark.parametrize(
    "given",
    [
        None,
        {},
        told() | {"pid": "x"},
        told() | {"metrics": {"moolink_calls_sent_total": [({}, "much")]}},
        told() | {"metrics": [1]},
        told() | {"own": [("x", "gauge", "")]},
        told() | {"paths": [("b",)]},
        told() | {"models": [{"group": "g"}]},
        told() | {"models": [model("leader") | {"rounds": [(1,)]}]},
        told() | {"models": [model("leader") | {"rounds": [(1, 1, 1, 1, 1, ["a"], *PHASES)]}]},
        told() | {"models": [model("leader") | {"rounds": [(1, math.nan, 1, 1, 1, {}, *PHASES)]}]},
        told() | {"models": [model("leader") | {"version": math.inf}]},
        told() | {"models": [model("leader") | {"waiting_for": 1}]},
        told() | {"pid": math.inf},
        told() | {"paths": [("b", "shm", math.nan)]},
        told() | {"metrics": {"moolink_group_epoch": 5}},
        told() | {"metrics": {"moolink_group_epoch": [({"group": "g"}, math.inf)]}},
        told() | {"metrics": {"process_resident_memory_bytes": [({}, "x")]}},
        told() | {"metrics": {"process_resident_memory_bytes": [({}, math.nan)]}},
        told() | {"metrics": {"process_resident_memory_bytes": [({}, 1.7e308)] * 2}},
        told() | {"metrics": {"moolink_calls_sent_total": [({}, 10**400)]}},
        told() | {"host": "x" * MOST_BYTES},
    ],
)
def test_a_report_of_another_form_changes_nothing(given: Any) -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report(steps=1))
    before = job.snapshot(2)
    with pytest.raises(ValueError, match=r"\w"):
        job.report(2, "a", json.dumps(given))
    with pytest.raises(ValueError, match=r"\w"):
        job.report(2, "a", given)
    assert job.snapshot(2) == before


def test_a_sample_that_is_given_twice_counts_once() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    twice = told() | {
        "own": [("x", "gauge", "", [({}, 1), ({}, 2)]), ("x", "gauge", "", [({}, 3)])]
    }
    job.report(1, "a", json.dumps(twice))
    families = {family.name: family.samples for family in job.families({})}
    assert families["x"] == [({"peer": "a"}, 1)]


@pytest.mark.parametrize(
    "metrics",
    [
        {"moolink_round_seconds": [({}, (1, 2))]},
        {"no such metric": [({}, 1)]},
        {"x": 1},
        {"x": [1]},
        {"moolink_of_a_later_version": [({}, 1)]},
        {"moolink_round_seconds": [({}, (["x"], [1, 1], 2.0))]},
        {"moolink_round_seconds": [({}, ([1.0], [1], 2.0))]},
        {"moolink_round_seconds": [({}, ([1.0], None, 2.0))]},
        {"moolink_peers": [({"__name__": "x"}, 1)]},
        {"moolink_peers": [({}, True)]},
    ],
)
def test_metrics_of_another_form_are_left_out(metrics: Any) -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    right = told()["metrics"]
    job.report(1, "a", json.dumps(told() | {"metrics": right | metrics}))
    assert [family.name for family in job.families({})] == list(right)


def test_the_metrics_of_a_process_count_once() -> None:
    job = Job(0)
    job.view(0, {"g": ["a", "b"]})
    for name in "ab":
        job.report(1, name, report(steps=5, mean_return=1.0))
    own = [Family("process_cpu_seconds_total", "counter", "", [Sample({}, 1.0)])]
    families = {f.name: f.samples for f in job.families({"broker": ("7", own)})}
    assert families["moolink_environment_steps_total"] == [({"pool": "0", "peer": "a"}, 5)]
    assert families["mean_return"] == [({"peer": "a"}, 1)]
    assert len(families["moolink_group_epoch"]) == 2, "which each peer has of its own"
    assert "process_cpu_seconds_total" not in families
    assert "process_cpu_seconds_total" in {
        family.name for family in job.families({"broker": ("8", own)})
    }


def test_texts_that_cannot_be_encoded() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    given = told() | {"host": "\ud800", "own": [("x", "gauge", "\ud800", [({"l": "\ud800"}, 1)])]}
    for text in (json.dumps(given), json.dumps(given).replace("\\ud800", "\\uD800")):
        job.report(1, "a", text)
        assert members(job, 1)["a"]["host"] == "?"
        assert b'x{l="?",peer="a"} 1.0' in prometheus.text(job.families({}))


def test_what_is_no_number_can_still_be_read_as_json() -> None:
    job = Job(0)
    job.view(0, {"g": ["a"]})
    job.report(1, "a", report(mean_return=math.nan, other=math.inf, third=1.0, fourth=10**400))
    job.tick(1)
    shown = job.snapshot(1)
    json.dumps(shown, allow_nan=False)
    assert shown["members"][0]["own"] == {"third": 1.0}
    assert shown["groups"][0]["history"] == [[1, 0, None]]


def test_a_report_of_a_later_version_may_say_more() -> None:
    now = told(models=[model("leader", rounds=[{"a": 1}])])
    later: dict[str, Any] = json.loads(json.dumps(now)) | {"new": {"key": 1}}
    later["paths"][0].append("new")
    later["models"][0]["new"] = 1
    later["models"][0]["rounds"][0].append(0.5)
    assert read(json.dumps(later)) == read(json.dumps(now))
