"""The engine's own measure of its bubble: what the device did nothing between two steps that followed each other."""

from __future__ import annotations

import time

from harness import Bench, request

HOST_S, DEVICE_S = 0.02, 0.04


class SlowHost(Bench):
    def _emit(self, client: bytes, messages: list) -> None:
        time.sleep(HOST_S)
        super()._emit(client, messages)


def idle_ms(checkpoint, overlap: bool) -> float:
    """Of ten decode steps, each longer than the host needs for one."""
    delay = lambda stream: time.sleep(DEVICE_S * (stream == "compute"))  # noqa: E731
    bench = SlowHost(checkpoint, overlap=overlap, debug=False, delay=delay)
    bench.engine.stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)
    bench.submit(*request("r", checkpoint, 0, task="query", picture="none", reasoning=False, max_tokens=11))
    bench.drain()
    status = bench.engine.snapshot()
    bench.close()
    assert status.steps == 11 and status.device_busy_ms >= 11 * 1e3 * DEVICE_S
    return status.device_idle_ms


def test_what_the_host_takes_between_two_steps_is_idle_unless_they_overlap(checkpoint):
    blocking, pipelined = (idle_ms(checkpoint, overlap) for overlap in (False, True))
    assert blocking >= 10 * 1e3 * HOST_S
    assert 0 <= pipelined < blocking


def test_the_time_without_requests_is_no_bubble(make_bench, checkpoint):
    bench = make_bench()
    for turn in range(3):
        bench.submit(
            *request(f"r{turn}", checkpoint, turn, task="query", picture="none", reasoning=False, max_tokens=1)
        )
        bench.drain()
        bench.engine.stepper.pause()  # as the engine's thread does when there is nothing to do
    status = bench.engine.snapshot()
    assert status.device_idle_ms == 0 and status.device_busy_ms > 0
