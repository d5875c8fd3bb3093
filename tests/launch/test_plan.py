"""Addresses of brokers that run beside the launcher."""

from __future__ import annotations

from contextlib import closing

import pytest

from moolink.launch.description import Job
from moolink.launch.host import LocalHost
from moolink.launch.loop import Loop
from moolink.launch.plan import plan_with_broker_here


@pytest.mark.parametrize(
    ("listen", "name", "address"),
    [
        ("0.0.0.0:0", "login", "login:7"),
        (":0", "login", "login:7"),
        ("[::]:0", "fd00::1", "[fd00::1]:7"),
        ("[fd00::2]:0", "login", "[fd00::2]:7"),
        ("10.0.0.1:0", "login", "10.0.0.1:7"),
    ],
)
def test_processes_get_an_address_that_they_reach(listen: str, name: str, address: str) -> None:
    job = Job.of_command(["true"])
    with closing(Loop()) as loop, closing(LocalHost(loop)) as here:
        plan = plan_with_broker_here(
            *(job, here, [], {}), program="x", python="python", listen=listen, name=name
        )
    assert plan.broker is not None
    assert plan.broker.address_for(here, 7) == address
