"""The metrics on Triton's port, and that they add up."""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Callable

import doors
import pytest
import tritonclient.grpc as triton
from doors import ServerError, wait_until

from photon_backend.numbers import ENDS, HISTOGRAMS
from photon_backend.serve import Server

ENDLESS = {"task": "caption", "max_tokens": 700, "temperature": 0}
GOOD = {"task": "caption", "max_tokens": 5, "temperature": 0}
MANY = 40  # requests that run for longer than numbers take to be published; more than the engine has rows


class Scrape(defaultdict[str, float]):
    """Values by name and labels as they stand in the text, without `photon_`; 0 where there is none."""

    def __init__(self, server: Server) -> None:
        with doors.OPENER.open(server.metrics_url, timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        found = (re.fullmatch(r"photon_(\S+) (\S+)", line) for line in lines)
        super().__init__(float, {match[1]: float(match[2]) for match in found if match})

    def total(self, name: str) -> float:
        """Over all labels."""
        return sum(value for key, value in self.items() if key.split("{")[0] == name)


def settled(server: Server) -> Scrape:
    """A scrape in which everything is counted: nothing runs, and it stayed the same for three seconds. A front end
    reports twice a second, and the publisher has its turn once."""
    last, since = Scrape(server), time.monotonic()
    end = since + 120
    while time.monotonic() - since < 3 or last["requests_running"]:
        time.sleep(0.2)
        now = Scrape(server)
        if now != last:
            last, since = now, time.monotonic()
        assert time.monotonic() < end, "the numbers do not come to rest"
    return last


def holds_once(server: Server, check: Callable[[Scrape], None]) -> None:
    """`check` asserts what is to be seen in one scrape. Values are published one after the other, so it take two."""
    end = time.monotonic() + 60
    while True:
        try:
            return check(Scrape(server))
        except AssertionError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def test_requests_add_up(server: Server, pictures: list[bytes]) -> None:
    before = settled(server)
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
        for _ in range(MANY):
            client.async_stream_infer("photon", doors.tensors({**ENDLESS, "stream": True, "image": pictures[3]}))
        started = before["requests_started_total"] + 16 + MANY
        wait_until(lambda: Scrape(server)["requests_started_total"] == started, 60, "all shown as started")
        wait_until(lambda: Scrape(server)["requests_running"] > 0, 60, "shown as running")
        client.stop_stream(cancel_requests=True)

    after = settled(server)
    grown = {
        (outcome, reason): after[series] - before[series]
        for outcome, reason in ENDS
        if (series := f'requests_ended_total{{outcome="{outcome}",reason="{reason}"}}') in after
    }
    cancelled = grown[("cancelled", "cancelled")]
    assert cancelled > 0 and grown[("ok", "deadline")] == 1
    assert grown[("ok", "length")] + grown[("ok", "stop")] + cancelled == 5 + MANY
    assert grown[("failed", "INVALID_ARG")] + grown[("refused", "INVALID_ARG")] == 10
    assert grown[("refused", "INVALID_ARG")] >= 5
    assert sum(grown.values()) == 16 + MANY
    assert after["requests_started_total"] == started == after.total("requests_ended_total")
    assert after["tokens_received_total"] - before["tokens_received_total"] >= tokens + 2


def test_engine_adds_up(server: Server, pictures: list[bytes]) -> None:
    doors.generate(server, image=pictures[0], **GOOD)
    engine = '{engine="0"}'

    def adds_up(now: Scrape) -> None:
        ended = sum(now[f"{name}_total{engine}"] for name in ("done", "failed", "cancelled"))
        assert now[f"submitted_total{engine}"] == ended > 0
        alone = now.total("steps_not_overlapped_total")
        assert now[f"steps_total{engine}"] == now[f"steps_overlapped_total{engine}"] + alone > 0
        assert 0 <= now[f"bubble{engine}"] <= 1 and now[f"device_busy_seconds_total{engine}"] > 0
        assert now[f"up{engine}"] == 1 and now[f"rows{engine}"] > now[f"rows_in_use{engine}"] == 0

    holds_once(server, adds_up)


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_are_prometheus_histograms(server: Server, pictures: list[bytes], name: str) -> None:
    doors.generate(server, image=pictures[0], **GOOD)
    bounds = [f"{bound:g}" for bound in HISTOGRAMS[name][1]] + ["+Inf"]

    def is_one(now: Scrape) -> None:
        buckets = [now[f'{name}_seconds_bucket{{le="{bound}"}}'] for bound in bounds]
        assert buckets == sorted(buckets) and buckets[-1] == now[f"{name}_seconds_count"] > 0
        low = sum(float(bounds[i - 1]) * (buckets[i] - buckets[i - 1]) for i in range(1, len(buckets)))
        assert now[f"{name}_seconds_sum"] >= low
        if name == "inter_token":
            assert buckets[-1] + now["ttft_seconds_count"] == now["tokens_received_total"]

    holds_once(server, is_one)
