"""A Slurm cluster of three nodes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, why_not


@pytest.fixture(scope="package")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := why_not():
        pytest.skip(reason)
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), 3)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(_started: Cluster) -> Iterator[Cluster]:
    """A cluster on which nothing runs; what the test leaves running is cancelled."""
    yield _started
    _started.empty()
