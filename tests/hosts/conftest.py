"""Clusters that tests share, and what their hosts printed when a test fails."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.cluster import Cluster, open_clusters


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.failed:
        for cluster in open_clusters:
            report.sections.append(
                (f"hosts {', '.join(str(host) for host in cluster.hosts)}", cluster.transcript())
            )
    return report


@pytest.fixture(scope="session")
def _two_hosts() -> Iterator[Cluster]:
    with Cluster(2) as cluster:
        yield cluster


@pytest.fixture
def two_hosts(_two_hosts: Cluster) -> Iterator[Cluster]:
    """Hosts a and b, whole and empty at the beginning of each test."""
    yield _two_hosts
    _two_hosts.reset()
