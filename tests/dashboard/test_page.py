"""The page in a headless Chromium: what a person sees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

import moolink
from moolink import tokens
from moolink.dashboard.job import Job
from moolink.dashboard.server import Dashboard
from tests import waiting
from tests.dashboard.dashboards import NotLocal, Served

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    reason = "needs Debian's chromium and chromium-driver: apt-get install chromium-driver"
    pytest.skip(reason, allow_module_level=True)

from selenium import webdriver  # noqa: E402
from selenium.webdriver.chrome.options import Options  # noqa: E402
from selenium.webdriver.chrome.service import Service  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402

MEMBER = """
import sys, moolink
with moolink.Rpc(sys.argv[2]) as rpc:
    rpc.connect(sys.argv[1])
    group = moolink.Group(rpc, "g")
    sys.stdin.read()
"""
HOSTILE = "<img src=x onerror=document.title='owned'>"


class Browser:
    """Chromium, and what the tests read in it."""

    def __init__(self) -> None:
        options = Options()
        options.binary_location = BROWSER or ""
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(DRIVER))

    def row(self, name: str) -> dict[str, str]:
        """The class, state and colour of a member's row; empty: there is none."""
        script = """
            for (const row of document.querySelectorAll("#members tr.member"))
                if (row.children[0].textContent === arguments[0])
                    return {state: row.parentNode.className,
                            note: row.nextSibling.hidden ? "" : row.nextSibling.textContent,
                            color: getComputedStyle(row).color,
                            background: getComputedStyle(row.parentNode).backgroundColor};
            return {};"""
        found: dict[str, str] = self.driver.execute_script(script, name)
        return found

    def text(self, selector: str) -> str:
        return str(self.driver.find_element(By.CSS_SELECTOR, selector).text)

    def errors(self) -> list[dict[str, Any]]:
        return [dict(entry) for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    one = Browser()
    yield one
    one.driver.quit()


def test_members_come_live_and_a_killed_one_turns_red(browser: Browser, served: Served) -> None:
    browser.driver.get(served.url)
    waiting.until(lambda: browser.text("#link") == "live", "the first turn", 0.1)
    assert "No peer yet" in browser.text("#empty")
    served.join(HOSTILE)
    command = [sys.executable, "-c", MEMBER, served.address, "victim"]
    member = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        waiting.until(lambda: browser.row("victim").get("state") == "up", "the member", 0.1)
        up = browser.row("victim")
    finally:
        member.kill()
        member.communicate()
    waiting.until(lambda: browser.row("victim").get("state") == "gone", "its end", 0.1)
    assert browser.row("victim")["background"] != up["background"]
    assert "victim has gone from g: its process was killed or crashed" in browser.text("#events")
    assert "its process was killed or crashed" in browser.row("victim")["note"]
    # The hostile name is text, in the table, the events and the picture.
    assert browser.row(HOSTILE)["state"] == "up"
    assert HOSTILE in browser.text("#events")
    assert browser.driver.title == "moolink"
    assert browser.driver.find_elements(By.CSS_SELECTOR, "main img") == []
    assert browser.errors() == []


def test_a_member_that_ends_well_is_grey_and_has_left(browser: Browser, served: Served) -> None:
    browser.driver.get(served.url)
    served.join("leaver")
    served.join("stayer")
    waiting.until(lambda: browser.row("leaver").get("state") == "up", "the member", 0.1)
    served.peers[0].close()
    waiting.until(lambda: browser.row("leaver").get("state") == "left", "its end", 0.1)
    row, other = browser.row("leaver"), browser.row("stayer")
    assert (row["note"], row["background"]) == ("", other["background"])
    assert row["color"] != other["color"]
    assert browser.text("#count") == "1, 1 left"
    assert "leaver left g" in browser.text("#events")
    assert "1 member\n" in browser.text("#groups")
    assert "epoch" not in browser.text("main")


def test_members_of_one_name_in_two_groups(browser: Browser, guarded: Served) -> None:
    groups = [guarded.join("x", group) for group in "ab"]
    browser.driver.get(guarded.url)
    for row in ("a/x", "b/x"):
        waiting.until(lambda: browser.row(row).get("state") == "up", row, 0.1)  # noqa: B023
    # A click on a row explains the connection of its own member.
    groups[0].rpc.close()
    waiting.until(lambda: browser.row("a/x").get("state") == "left", "the end of one", 0.1)
    assert browser.row("b/x")["state"] == "up"
    for row in browser.driver.find_elements(By.CSS_SELECTOR, "tr.member"):
        name = row.find_element(By.CSS_SELECTOR, "td.name").text
        row.click()
        expected = "it has left the job" if name == "a/x" else "in use"
        waiting.until(lambda: expected in browser.text("#explained"), name, 0.1)  # noqa: B023
        assert browser.text("#explained b") == f"{name} – broker"  # noqa: RUF001
        browser.driver.find_element(By.ID, "close").click()
    assert "a/x left" in browser.text("#events")
    assert browser.errors() == []


def test_the_explanation_opens_where_one_clicked(browser: Browser, served: Served) -> None:
    served.join("a")
    served.wait_for({"a": "up"})
    browser.driver.get(served.url)
    waiting.until(lambda: "all shared memory" in browser.text("#kinds"), "a path", 0.1)
    assert not browser.driver.find_elements(By.CSS_SELECTOR, "#paths svg"), "nothing to look for"
    browser.driver.find_element(By.CSS_SELECTOR, "#fold summary").click()
    waiting.until(
        lambda: bool(browser.driver.find_elements(By.CSS_SELECTOR, "#paths line")), "the line", 0.1
    )
    click = """
        document.querySelector("#paths line").dispatchEvent(
            new MouseEvent("click", {clientX: 200, clientY: 150}))"""
    browser.driver.execute_script(click)
    waiting.until(lambda: "shm: in use" in browser.text("#explained"), "the reasons", 0.1)
    place = browser.driver.find_element(By.ID, "explained").rect
    top = browser.driver.execute_script("return scrollY")
    assert (place["x"], place["y"] - top) == (208, 158)
    browser.driver.find_element(By.ID, "close").click()
    assert browser.text("#explained") == ""
    browser.driver.find_element(By.CSS_SELECTOR, "tr.member").click()
    waiting.until(lambda: "shm: in use" in browser.text("#explained"), "those of the row", 0.1)


def test_charts_have_axes_and_a_value_under_the_pointer(
    browser: Browser, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Job.snapshot

    def with_history(job: Job, now: float) -> dict[str, Any]:
        told = snapshot(job, now)
        for group in told["groups"]:
            group["history"] = [[now - 120 + i, 1000.0 + i, 50.0] for i in range(121)]
        return told

    monkeypatch.setattr(Job, "snapshot", with_history)
    served.join("a")
    browser.driver.set_window_size(1280, 900)
    browser.driver.get(served.url)
    waiting.until(lambda: "mean return" in browser.text("#groups"), "the charts", 0.1)
    text = browser.text(".charts")
    assert "environment steps per second 1120 steps/s" in text
    for mark in ("1050", "1100", "\N{MINUS SIGN}1 min", "now"):
        assert mark in text, mark
    hover = """
        const chart = document.querySelector(".chart"), box = chart.getBoundingClientRect();
        chart.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + 54}));
        return chart.previousSibling.textContent;"""
    assert " 1000 steps/s at " in browser.driver.execute_script(hover)
    width = """
        const [chart, table] = [".chart", "#members"].map((s) => document.querySelector(s));
        return [chart.clientWidth, table.clientWidth, table.parentNode.clientWidth]"""
    chart, table, room = browser.driver.execute_script(width)
    assert chart > 550
    assert table <= room, "no column is cut"
    browser.driver.set_window_size(1300, 1000)


def test_filter_and_order(browser: Browser, served: Served) -> None:
    for name in ("a2", "a10", "b"):
        served.join(name)
    served.wait_for({"a2": "up", "a10": "up", "b": "up"})
    browser.driver.get(served.url)

    def names() -> list[str]:
        rows = browser.driver.find_elements(By.CSS_SELECTOR, "#members td.name")
        return [cell.text for cell in rows]

    waiting.until(lambda: names() == ["a2", "a10", "b"], "the members in order", 0.1)
    browser.driver.find_element(By.CSS_SELECTOR, "#columns th").click()
    assert names() == ["b", "a10", "a2"]
    browser.driver.find_element(By.ID, "filter").send_keys("a1")
    assert names() == ["a10"]


def test_on_a_phone_nothing_is_cut_off(browser: Browser, served: Served) -> None:
    served.join("a")
    served.wait_for({"a": "up"})
    browser.driver.set_window_size(390, 800)
    browser.driver.get(served.url)
    waiting.until(lambda: browser.row("a") != {}, "the member", 0.1)
    width = "return [document.documentElement.scrollWidth, window.innerWidth]"
    scrolled, inner = browser.driver.execute_script(width)
    assert scrolled <= inner, "only the table itself scrolls sideways"
    browser.driver.set_window_size(1300, 1000)


def test_the_key_opens_it(browser: Browser) -> None:
    of = NotLocal()
    try:
        browser.driver.get(of.url)
        browser.driver.find_element(By.ID, "key").send_keys("wrong\n")
        waiting.until(lambda: "wrong" in browser.driver.current_url, "the refusal", 0.1)
        browser.driver.find_element(By.ID, "key").send_keys(of.key + "\n")
        waiting.until(
            lambda: (
                bool(browser.driver.find_elements(By.ID, "link"))
                and browser.text("#link") == "live"
            ),
            "the page",
            0.1,
        )
    finally:
        of.dashboard.close()
        of.broker.close()


def test_another_key_asks_for_it_again(browser: Browser) -> None:
    of = NotLocal()
    browser.driver.get(of.url)
    browser.driver.find_element(By.ID, "key").send_keys(of.key + "\n")
    waiting.until(
        lambda: (
            bool(browser.driver.find_elements(By.ID, "link")) and browser.text("#link") == "live"
        ),
        "the page",
        0.1,
    )
    of.dashboard.close()
    other = Dashboard(of.broker, of.dashboard.address, tokens.new().dashboard())
    try:
        login = "return location.pathname === '/login' && document.readyState === 'complete'"
        waiting.until(lambda: bool(browser.driver.execute_script(login)), "the form", 0.2)
        browser.driver.find_element(By.ID, "key").send_keys(of.key + "\n")
        waiting.until(lambda: "wrong" in browser.driver.current_url, "the refusal", 0.1)
        waiting.until(lambda: browser.text("#wrong") == "This key is wrong.", "the word", 0.1)
    finally:
        other.close()
        of.broker.close()


def test_rounds_and_the_member_that_they_wait_for(
    browser: Browser, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = "<b>slow</b>"
    view = Job.view

    def training(job: Job, now: float, groups: Any, connected: Any) -> list[str]:
        view(job, now, {"g": ["fast", slow]})
        for name, gather in (("fast", 0.3), (slow, 0.001)):
            leads = name == "fast"
            rounds = [
                (
                    i,
                    now,
                    0.5,
                    8,
                    i % 2,
                    {"fast": 3} | ({slow: 1} if i == 0 else {}),
                    gather,
                    0.05,
                    0.01,
                )
                for i in range(8)
            ]
            model = {
                "group": "g",
                "name": "model",
                "role": "leader" if leads else "member",
                "leader": "fast",
                "version": 7,
                "waiting_for": [],
                "idle": 0.0,
                "still": 5.0,
                "awaited": "contributions <i>of all</i>",
                "typical": 0.5,
                "rounds": rounds if leads else [],
            }
            told = {"host": "h", "pid": 1, "process": name, "metrics": {}, "own": [], "paths": []}
            job.report(now, name, json.dumps(told | {"models": [model]}))
        return []

    monkeypatch.setattr(Job, "view", training)
    browser.errors()  # those of the tests before
    browser.driver.get(served.url)
    waiting.until(
        lambda: bool(browser.driver.find_elements(By.CSS_SELECTOR, ".rounds g")), "rounds", 0.1
    )
    # In one script: the charts are drawn anew each second.
    bars, heights, text = browser.driver.execute_script(
        """
        const bars = document.querySelectorAll(".rounds g");
        const heights = arguments[0].map(
            (name) => Number(bars[0].querySelector("." + name).getAttribute("height")));
        return [bars.length, heights, document.querySelector(".model").textContent];""",
        ["gather", "compute", "reduce", "deliver"],
    )
    assert bars == 8
    assert heights == sorted(heights, reverse=True)
    assert heights[-1] > 0
    assert (
        f"slowest: {slow}, with 1 contribution to the last 8 rounds; the fastest member made 24"
        in text
    )
    assert "nothing for 5 s: waits for contributions <i>of all</i>" in text
    assert "compute 140.0 ms, gather 300.0 ms, reduce 50.0 ms, deliver 10.0 ms" in text
    assert f"without {slow}" in text
    assert browser.errors() == []


def test_five_hundred_members(
    browser: Browser, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"member{i}" for i in range(500)]
    told = json.dumps(
        {
            "host": "h",
            "pid": 1,
            "process": "1",
            "metrics": {"process_cpu_seconds_total": [({}, 1.0)]},
            "own": [],
            "paths": [("broker", "tcp", 1e-3)] * 8,
            "models": [],
        }
    )
    view = Job.view

    def crowded(job: Job, now: float, groups: Any, connected: Any) -> list[str]:
        view(job, now, {"g": names})
        for name in names:
            job.report(now, name, told)
        return []

    monkeypatch.setattr(Job, "view", crowded)
    browser.driver.get(served.url)
    waiting.until(lambda: browser.row("member499").get("state") == "up", "all members", 0.2)
    before = browser.driver.execute_script("return job.time")
    later = "return job.time > arguments[0]"
    waiting.until(lambda: browser.driver.execute_script(later, before), "another turn", 0.2)
    assert len(browser.driver.find_elements(By.CSS_SELECTOR, "#members tr.member")) == 500
    assert "Too many members for a picture" in browser.text("#legend")
    assert moolink.__version__ in browser.text("#broker")
