"""A real Prometheus scrapes the dashboard, and answers the queries of the Grafana dashboard."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.parse
from pathlib import Path
from typing import Any

import pytest
import torch

import moolink
from tests import waiting
from tests.dashboard.dashboards import Served, get
from tests.docs.examples import ROOT
from tests.ports import unused_port

PROMETHEUS = shutil.which("prometheus")


def train(served: Served) -> moolink.Accumulator:
    """An accumulator that has applied some rounds; its metrics end with it."""
    group = served.join("a")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    accumulator = moolink.Accumulator("model", model.parameters(), group=group)
    for step in accumulator.steps(optimizer, until=lambda totals: totals["steps"] >= 30):
        model(torch.ones(1, 2)).sum().backward()
        step.reduce(batch_size=4, counters={"steps": 1})
    return accumulator


@pytest.mark.skipif(PROMETHEUS is None, reason="needs Debian's prometheus: apt-get install")
def test_scraping_and_the_queries_of_grafana(served: Served, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "dashboard.md").read_text()
    example = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]
    config = "".join(
        line + "\n" for line in example.splitlines() if "authorization" not in line
    ).replace("127.0.0.1:4480", served.dashboard.address)
    (tmp_path / "prometheus.yml").write_text(config.replace("5s", "1s"))
    port = unused_port()
    assert PROMETHEUS is not None
    server = subprocess.Popen(
        [
            PROMETHEUS,
            f"--config.file={tmp_path}/prometheus.yml",
            f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    url = f"http://127.0.0.1:{port}/api/v1"

    def ask(query: str) -> list[Any]:
        told = json.loads(get(f"{url}/query?" + urllib.parse.urlencode({"query": query}))[1])
        assert told["status"] == "success", (query, told)
        found: list[Any] = told["data"]["result"]
        return found

    def ready() -> bool:
        try:
            return get(f"http://127.0.0.1:{port}/-/ready")[0] == 200
        except OSError:
            return False  # it does not listen yet

    def up() -> bool:
        return any(sample["value"][1] == "1" for sample in ask("up"))

    try:
        waiting.until(ready, "a server that is ready", 0.2)
        waiting.until(up, "the first scrape", 0.2)
        accumulator = train(served)
        panels = json.loads((ROOT / "docs" / "dashboards" / "grafana.json").read_text())["panels"]
        for panel in panels:
            (target,) = panel["targets"]
            query, results = target["expr"], []

            # A rate needs two scrapes, and some metrics come with the first round.
            def has_results(query: str = query, results: list[Any] = results) -> bool:
                results[:] = ask(query)
                return bool(results)

            waiting.until(has_results, panel["title"], 0.2)
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert label in results[0]["metric"], panel["title"]
        accumulator.close()
    finally:
        server.terminate()
        server.wait()
