"""A DataLoader whose forked workers read received arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import moolink
from tests.waiting import until

torch = pytest.importorskip("torch")
data = pytest.importorskip("torch.utils.data")

ROWS, BATCH = 48, 4
ROW = 300 << 10  # bytes: each array is received into shared memory


class Received(data.Dataset):  # type: ignore[misc,name-defined]
    """Rows that a peer has sent, each full of its number."""

    def __init__(self, rows: list[npt.NDArray[Any]]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        row = torch.from_numpy(self._rows[index])
        row += 100  # a worker may write what it has, and its parent does not see it
        return row.clone().sub_(100), row.sub_(100).clone()


@pytest.fixture
def client() -> Iterator[moolink.Rpc]:
    server = moolink.Rpc("server", timeout=20)
    client = moolink.Rpc("client", timeout=20)
    server.define("row", lambda value: np.full(ROW, value, np.uint8))
    with server, client:
        client.connect(server.listen("127.0.0.1:0")[0])
        until(lambda: client.explain("server")["path"] == "shm", "the shared memory path")
        yield client


def test_two_forked_workers_read_what_was_received_before_the_fork(client: moolink.Rpc) -> None:
    rows = [client.sync("server", "row", value) for value in range(ROWS)]
    loader = data.DataLoader(
        Received(rows),
        batch_size=BATCH,
        num_workers=2,
        multiprocessing_context="fork",
        timeout=180,
    )
    batches = 0
    for _ in range(2):
        batches_of_epoch = iter(loader)  # forks the workers
        for value in range(ROWS):  # the parent goes on: it replaces each row, and receives more
            rows[value] = client.sync("server", "row", 200)
        for n, (first, second) in enumerate(batches_of_epoch):
            wanted = torch.arange(n * BATCH, (n + 1) * BATCH, dtype=torch.uint8)[:, None]
            assert (first == wanted).all(), f"batch {n} holds {torch.unique(first)}"
            assert (second == wanted).all(), f"batch {n} holds {torch.unique(second)}"
            batches += 1
        for value in range(ROWS):
            assert (rows[value] == 200).all()
            rows[value] = client.sync("server", "row", value)
    assert batches == 2 * ROWS // BATCH
