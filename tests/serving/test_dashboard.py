"""The dashboard and docs/operations.md speak of the metrics that the server has, and the latter of all of them."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import doors
import pytest
from doors import wait_until

from photon_backend.serve import Server

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"photon_[a-z0-9_]+")
SERIES = re.compile(r"^(photon_[a-z0-9_]+)", re.MULTILINE)
PARTS = re.compile(r"_(bucket|sum|count)$")


@pytest.fixture(scope="module")
def metrics(server: Server) -> set[str]:
    """Names of all metrics. They come one after the other, so: when for two turns of the publisher no new one came."""

    def scrape() -> set[str]:
        with doors.OPENER.open(server.metrics_url, timeout=60) as reply:
            return set(SERIES.findall(reply.read().decode()))

    names = scrape()

    def complete() -> bool:
        before = set(names)
        time.sleep(2.5)  # the publisher's period is a second
        names.update(scrape())
        return "photon_up" in before and names == before

    wait_until(complete, 60, "metrics published")
    return names


def test_dashboard(metrics: set[str]) -> None:
    dashboard = json.loads((ROOT / "docker" / "grafana" / "dashboards" / "photon.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 20
    assert {name for query in queries for name in NAME.findall(query)} <= metrics


def test_operations_page(metrics: set[str]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.split("## Metrics")[1].split("\n## ")[0]
    described = {name for line in table.splitlines() if line.startswith("| `photon_") for name in NAME.findall(line)}
    assert described == {PARTS.sub("", name) for name in metrics}
    models = {path.name for path in (ROOT / "model_repository").iterdir()}
    assert set(NAME.findall(text)) <= described | models | {"photon_client", "photon_backend"}
