"""Two processes of one machine that call each other by RDMA alone; at last one is killed.

    python -m tests.nightly.verbs.calls [MEGABYTES]

Prints one JSON object with what was seen.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np

import moolink


def serve() -> None:
    """Listens, prints the address, and serves until it is killed."""
    server = moolink.Rpc("server", transports=["verbs"])
    server.define("echo", lambda value: value)
    server.define("forever", signal.pause)
    (address, *_) = server.listen("verbs://:0")
    print(address, flush=True)
    sys.stdin.read()


def main(megabytes: int) -> None:
    """Calls a server of its own and checks every answer."""
    command = [sys.executable, "-m", "tests.nightly.verbs.calls", "serve"]
    with (
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process,
        moolink.Rpc("client", transports=["verbs"], timeout=120) as client,
    ):
        assert process.stdout is not None
        client.connect(process.stdout.readline().strip())
        sizes = [0, 1, 100, 4_096, 16_384, 70_000, 1 << 20, megabytes << 20]
        generator = np.random.default_rng(1)
        for size in sizes:
            sent = generator.integers(0, 256, size, dtype=np.uint8)
            np.testing.assert_array_equal(client.sync("server", "echo", sent), sent)
        calls = [client.async_("server", "echo", i) for i in range(500)]
        assert [call.result() for call in calls] == list(range(500))
        client.sync("server", "echo", np.ones(megabytes << 20, np.uint8))
        known = client.explain("server")
        waiting = client.async_("server", "forever")
        client.sync("server", "echo", "it runs")
        process.kill()
        try:
            waiting.result()
        except moolink.PeerLost as lost:
            ran = lost.ran
        paths = client.stats()["paths"]
    print(
        json.dumps(
            {
                "path": known["path"],
                "ran": ran,
                "written": {name: path["bytes_written"] for name, path in paths.items()},
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 8)
