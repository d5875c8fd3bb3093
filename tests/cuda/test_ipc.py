"""Tensors between two processes by way of the device alone (MOOLINK_CUDA_IPC=1)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from typing import Any

from tests.cuda.fake_driver import ROOT

PROGRAM = """
    import signal, subprocess, sys
    import torch
    import moolink
    from moolink import _core
    from tests.waiting import until

    def start():
        process = subprocess.Popen([sys.executable, "-m", "tests.cuda.receiver", "same"],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        client.connect(process.stdout.readline().split()[0])
        return process

    def by_device():
        before = _core.cuda_info()["bytes_within_device"]
        assert torch.equal(client.sync("receiver", "echo", tensor), tensor)
        return _core.cuda_info()["bytes_within_device"] > before

    client = moolink.Rpc("client", device="same", timeout=60)
    tensor = torch.randn(4_000_000, device="cuda")
    """


def run(text: str) -> None:
    """Runs the program in a process of its own, which reads the variable at its first tensor."""
    program = textwrap.dedent(PROGRAM) + textwrap.dedent(text)
    environment = {**os.environ, "MOOLINK_CUDA_IPC": "1"}
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=environment, cwd=ROOT, timeout=200
    )


def test_tensors_go_from_device_to_device(torch: Any) -> None:
    run(
        """
        receiver = start()
        until(by_device, "a loan of device memory")
        before = _core.cuda_info()
        for size in (300_000, 4_000_000, 16_000_000):
            for turn in range(5):
                sent = torch.randn(size, device="cuda")
                torch.cuda._sleep(20_000_000)
                sent.add_(turn)  # queued, like any step of a training
                expected = sent.clone()
                future = client.async_("receiver", "echo", sent)
                sent.zero_()
                assert torch.equal(future.result(), expected)
        assert _core.cuda_info()["bytes_to_host"] == before["bytes_to_host"]
        receiver.communicate()
        """
    )


def test_a_killed_receiver_leaks_no_memory_and_breaks_no_context(torch: Any) -> None:
    run(
        """
        receiver = start()
        until(by_device, "a loan of device memory")
        free = []
        for turn in range(10):
            calls = [client.async_("receiver", "echo", tensor) for _ in range(20)]
            calls[0].result()
            receiver.send_signal(signal.SIGKILL)
            receiver.communicate()
            for call in calls:
                try:
                    assert torch.equal(call.result(), tensor)
                except moolink.PeerLost:
                    pass
            del calls
            receiver = start()
            until(by_device, "a loan of device memory")
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            free.append(torch.cuda.mem_get_info()[0])
        assert free[-1] > free[0] - (256 << 20), free
        receiver.communicate()
        """
    )
