"""What the dashboard costs: the broker's CPU for many members, the first paint, an echo beside it.

    python benchmarks/dashboard.py --members 500

The members are peers of a few processes, one group each process. The broker's CPU time is measured
without a dashboard, with one, and with one that a browser shows and Prometheus scrapes once a
second. The echo's round trips take turns with and without scraping of its own broker.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator

import psutil

import moolink

PROCESSES = 5
MEMBERS = """
import sys, moolink
address, name, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
peers = [moolink.Rpc(f"{name}-{i}", transports=["tcp"]) for i in range(count)]
groups = []
for peer in peers:
    peer.connect(address)
    groups.append(moolink.Group(peer, name))
for group in groups:
    group.wait_for_members(count, 120)
print("formed", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def broker(*arguments: str) -> Iterator[tuple[psutil.Process, str, str]]:
    """A broker's process, its address, and its dashboard's URL."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moolink.broker", "127.0.0.1:0", "--first", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        address, url = process.stdout.readline().split()[-1], ""
        if arguments:
            url = process.stdout.readline().split()[-1]
        yield psutil.Process(process.pid), address, url
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def members(address: str, count: int) -> Iterator[None]:
    """Processes with so many members in all."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBERS, address, f"group-{i}", str(count // PROCESSES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(PROCESSES)
    ]
    try:
        for process in started:
            assert process.stdout is not None
            assert process.stdout.readline() == "formed\n"
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def scraping(url: str) -> Iterator[None]:
    """Reads /metrics once a second meanwhile."""
    ended = threading.Event()

    def scrape() -> None:
        while not ended.wait(1.0):
            with urllib.request.urlopen(f"{url}/metrics") as answer:
                answer.read()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def browsing(url: str) -> Iterator[float]:
    """Shows the page in Chromium meanwhile; gives the seconds until its first paint."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.get(url)
        time.sleep(3)
        script = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
        yield driver.execute_script(script) / 1e3
    finally:
        driver.quit()


def load(process: psutil.Process, seconds: float) -> float:
    """The share of a core that a process takes."""
    process.cpu_percent()
    time.sleep(seconds)
    return float(process.cpu_percent())


def crowd(count: int, seconds: float) -> None:
    with broker() as (process, address, _), members(address, count):
        print(f"{count} members, no dashboard: {load(process, seconds):.1f} % of a core")
    with broker("--http", "127.0.0.1:0") as (process, address, url), members(address, count):
        print(f"with the dashboard: {load(process, seconds):.1f} %")
        with scraping(url):
            print(f"and scraped once a second: {load(process, seconds):.1f} %")
        if shutil.which("chromium"):
            with browsing(url) as paint:
                print(f"and shown in a browser: {load(process, seconds):.1f} %")
                print(f"first contentful paint after {paint * 1e3:.0f} ms")


def echo(seconds: float) -> None:
    """Two members of a group call each other; the dashboard asks them, and is scraped."""
    times: dict[bool, list[float]] = {False: [], True: []}
    with (
        broker("--http", "127.0.0.1:0") as (_, address, url),
        moolink.Rpc("a") as a,
        moolink.Rpc("b") as b,
    ):
        for rpc in (a, b):
            rpc.connect(address)
        with moolink.Group(a, "g") as one, moolink.Group(b, "g"):
            one.wait_for_members(2, 60)
            a.define("echo", lambda x: x)
            for turn in range(10):
                scraped = turn % 2 == 1
                with scraping(url) if scraped else contextlib.nullcontext():
                    deadline = time.monotonic() + seconds / 10
                    while time.monotonic() < deadline:
                        began = time.perf_counter()
                        b.sync("a", "echo", 1)
                        times[scraped].append(time.perf_counter() - began)
    without, scraped = (statistics.median(of) * 1e6 for of in times.values())
    print(f"echo p50: {without:.2f} us, {scraped:.2f} us scraped ({scraped / without - 1:+.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=10, help="of each measurement")
    options = parser.parse_args()
    echo(options.seconds * 2)
    crowd(options.members, options.seconds)


if __name__ == "__main__":
    main()
