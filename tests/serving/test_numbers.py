"""The metrics on Triton's port, and that they add up."""

from __future__ import annotations

import re
import time
from collections import defaultdict

import doors
import pytest
import tritonclient.grpc as triton
from doors import ServerError, wait_until

from photon_backend.numbers import ENDS, HISTOGRAMS
from photon_backend.serve import Server

ENDLESS = {"task": "caption", "max_tokens": 700, "temperature": 0}
GOOD = {"task": "caption", "max_tokens": 5, "temperature": 0}


class Scrape(defaultdict[str, float]):
    """Values by name and labels as they stand in the text, without `photon_`; 0 where there is none."""

    def __init__(self, server: Server) -> None:
        with doors.OPENER.open(server.metrics_url) as reply:
            lines = reply.read().decode().splitlines()
        found = (re.fullmatch(r"photon_(\S+) (\S+)", line) for line in lines)
        super().__init__(float, {match[1]: float(match[2]) for match in found if match})

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for key, value in self.items() if key.split("{")[0] == name)


def settled(server: Server, started: float) -> Scrape:
    """A scrape after everything has ended and was published."""
    wait_until(lambda: Scrape(server)["requests_started_total"] >= started, 20, "all counted")
    wait_until(lambda: Scrape(server)["requests_running"] == 0, 20, "none running")
    time.sleep(1.5)  # the engine's heartbeat and one more turn of the publisher
    return Scrape(server)


def test_requests_add_up(server: Server, pictures: list[bytes]) -> None:
    before = settled(server, 0)
    tokens = 0
    for door in doors.DOORS.values():
        tokens += door(server, image=pictures[0], **GOOD).usage["output_tokens"]  # type: ignore[index]
        with pytest.raises(ServerError, match="INVALID_ARG"):
            door(server, image=pictures[0], temperature=7)
        with pytest.raises(ServerError, match="INVALID_ARG"):
            door(server, image=pictures[1][:-400], **GOOD)
    assert doors.generate(server, image=pictures[2], max_time_ms=100, **ENDLESS).finish_reason == "deadline"
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: None)
        client.async_stream_infer("photon", doors.tensors({**ENDLESS, "stream": True, "image": pictures[3]}))
        wait_until(lambda: Scrape(server)["requests_running"] == 1, 10, "shown as running")
        client.stop_stream(cancel_requests=True)

    after = settled(server, before["requests_started_total"] + 17)
    grown = {
        (outcome, reason): after[series] - before[series]
        for outcome, reason in ENDS
        if (series := f'requests_ended_total{{outcome="{outcome}",reason="{reason}"}}') in after
    }
    assert grown[("ok", "length")] == 5 and grown[("ok", "deadline")] == 1 and grown[("cancelled", "cancelled")] == 1
    assert grown[("failed", "INVALID_ARG")] + grown[("refused", "INVALID_ARG")] == 10
    assert grown[("refused", "INVALID_ARG")] >= 5
    assert after["requests_started_total"] - before["requests_started_total"] == sum(grown.values()) == 17
    assert after["requests_started_total"] == after.total("requests_ended_total")
    assert after["tokens_received_total"] - before["tokens_received_total"] >= tokens + 2


def test_engine_adds_up(server: Server, pictures: list[bytes]) -> None:
    doors.generate(server, image=pictures[0], **GOOD)
    now = settled(server, 1)
    engine = '{engine="0"}'
    ended = sum(now[f"{name}_total{engine}"] for name in ("done", "failed", "cancelled"))
    assert now[f"submitted_total{engine}"] == ended > 0
    alone = now.total("steps_not_overlapped_total")
    assert now[f"steps_total{engine}"] == now[f"steps_overlapped_total{engine}"] + alone > 0
    assert 0 <= now[f"bubble{engine}"] <= 1 and now[f"device_busy_seconds_total{engine}"] > 0
    assert now[f"up{engine}"] == 1 and now[f"rows{engine}"] > now[f"rows_in_use{engine}"] == 0


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_are_prometheus_histograms(server: Server, pictures: list[bytes], name: str) -> None:
    doors.generate(server, image=pictures[0], **GOOD)
    now = settled(server, 1)
    bounds = [f"{bound:g}" for bound in HISTOGRAMS[name][1]] + ["+Inf"]
    buckets = [now[f'{name}_seconds_bucket{{le="{bound}"}}'] for bound in bounds]
    assert buckets == sorted(buckets) and buckets[-1] == now[f"{name}_seconds_count"] > 0
    low = sum(float(bounds[i - 1]) * (buckets[i] - buckets[i - 1]) for i in range(1, len(buckets)))
    assert now[f"{name}_seconds_sum"] >= low
    if name == "inter_token":
        assert buckets[-1] + now["ttft_seconds_count"] == now["tokens_received_total"]
