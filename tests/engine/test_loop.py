"""The loop's bookkeeping on the real engine: limits, zombies, rows, pictures, failures, deadlines, threads."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from harness import CLIENT, Answer, Bench, request
from msgspec.structs import replace

from photon_backend.engine.slots import DecodeSlot
from photon_backend.engine.stepper import Stepper
from photon_backend.model.config import load_config
from photon_backend.protocol import Done, Failed, NeedPicture


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_length_limit_launches_not_one_step_too_many(make_bench, checkpoint, number, overlap):
    bench = make_bench(overlap=overlap)
    special = bench.engine.config.tokenizer
    bench.engine.stepper.runner.rows.forbid(special.eos_id)  # it would end by itself
    submit, _ = request("r", checkpoint, 3, task="query", picture="tiny", reasoning=False, max_tokens=number)
    bench.submit(submit, "tiny")
    answer = bench.drain()["r"]
    assert answer.reason == "length" and len(answer.ids) == number
    assert bench.engine.pipeline.num_launched == number
    bench.assert_baseline()


def test_the_context_is_filled_to_its_last_position(make_bench, checkpoint):
    bench = make_bench()
    context = bench.engine.config.text.max_context
    bench.engine.stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)
    submit, _ = request("r", checkpoint, 3, task="query", picture="none", reasoning=False, max_tokens=50)
    submit.prompt_ids += [30] * (context - len(submit.prompt_ids) - 5)
    bench.submit(submit)
    answer = bench.drain()["r"]
    assert answer.reason == "length" and len(answer.ids) == 5
    submit.request_id = "full"
    submit.prompt_ids += [30] * 5
    bench.submit(submit)
    end = bench.drain()["full"].end
    assert isinstance(end, Failed) and end.code == "INVALID_ARG"
    assert str(context) in end.message and "text_input" in end.message


def test_a_row_is_reused_in_the_tick_after_its_release(make_bench, checkpoint):
    """One row: every request takes it over from a zombie or a finished one, and nothing of the former owner is left."""
    alone = {}
    batch = [request(f"r{i}", checkpoint, 40 + i) for i in range(8)]
    for submit, name in batch:
        bench = make_bench(overlap=False)
        bench.submit(submit, name)
        alone |= {key: answer.told for key, answer in bench.drain().items()}
    bench = make_bench(rows=1)
    for submit, name in batch:
        bench.submit(submit, name)
    assert {key: answer.told for key, answer in bench.drain().items()} == alone


def test_a_request_that_can_never_fit_fails_alone(make_bench, checkpoint):
    bench = make_bench(pages=8)
    good, name = request("good", checkpoint, 1, task="caption", max_tokens=4)
    huge, _ = request("huge", checkpoint, 1, task="query", reasoning=False, max_tokens=500)
    also, also_name = request("also", checkpoint, 2, task="caption", max_tokens=4)
    for submit, picture_name in ((good, name), (huge, name), (also, also_name)):
        bench.submit(submit, picture_name)
    answers = bench.drain()
    assert answers["huge"].reason == "INVALID_ARG" and str(8 * 16) in answers["huge"].end.message
    assert isinstance(answers["good"].end, Done) and isinstance(answers["also"].end, Done)


def test_a_full_waiting_list_refuses_at_once(make_bench, checkpoint):
    bench = make_bench(rows=1, max_waiting=2)
    for i in range(5):
        bench.submit(*request(f"r{i}", checkpoint, i, task="caption"))
    bench.tick()
    refused = [key for key, answer in bench.answers.items() if isinstance(answer.end, Failed)]
    assert refused == ["r2", "r3", "r4"]
    assert all(bench.answers[key].reason == "UNAVAILABLE" for key in refused)
    assert {key: a.reason for key, a in bench.drain().items() if key not in refused}.keys() == {"r0", "r1"}
    bench.assert_baseline()


def test_two_requests_with_one_new_picture_share_its_prefill(make_bench, checkpoint):
    bench = make_bench()
    for i in range(4):
        bench.submit(*request(f"r{i}", checkpoint, i, picture="wide"))
    answers = bench.drain()
    assert bench.asked == ["r0"]
    assert (bench.engine.cache.misses, bench.engine.cache.hits) == (1, 3)
    prefix = bench.engine.config.prefix_len
    assert [answers[f"r{i}"].end.usage.cached_tokens for i in range(4)] == [0, prefix, prefix, prefix]


def test_the_next_one_is_asked_when_the_bringer_leaves(make_bench, checkpoint):
    bench = make_bench()
    bench.deliver = False
    for i in range(3):
        bench.submit(*request(f"r{i}", checkpoint, i, picture="wide"))
    bench.tick()
    assert bench.asked == ["r0"]
    bench.cancel("r0")
    bench.tick()
    assert bench.asked == ["r0", "r1"]
    bench.deliver = True
    bench.bring("r1")
    answers = bench.drain()
    assert answers["r0"].reason == "cancelled"
    assert isinstance(answers["r1"].end, Done) and isinstance(answers["r2"].end, Done)
    bench.assert_baseline()


def test_more_pictures_than_pages_asks_again_after_eviction(make_bench, checkpoint):
    """A request that hoped for a cached prefix is asked for its picture once that prefix was evicted."""
    bench = make_bench(pages=10, rows=2)
    for i in range(40):
        bench.submit(*request(f"r{i}", checkpoint, i, max_tokens=4, max_objects=1))
    answers = bench.drain()
    assert len(answers) == 40 and all(isinstance(a.end, Done) for a in answers.values())
    assert bench.engine.cache.num_dropped > 3
    bench.assert_baseline()


def test_who_hoped_for_a_prefix_that_was_evicted_meanwhile_is_asked(make_bench, checkpoint):
    """By a request that needs the whole pool and brings no picture, so that nothing else gives a reason to ask."""
    bench = make_bench(rows=1, pages=20)
    bench.submit(*request("first", checkpoint, 0, picture="wide", task="caption", max_tokens=2))
    bench.drain()
    submit, _ = request("everything", checkpoint, 1, picture="none", task="query", reasoning=False)
    max_tokens = 20 * bench.settings.page_size - len(submit.prompt_ids) + 1
    bench.submit(replace(submit, sampling=replace(submit.sampling, max_tokens=max_tokens)))
    bench.submit(*request("hopeful", checkpoint, 2, picture="wide", task="caption", max_tokens=2))
    answers = bench.drain()
    assert bench.asked == ["first", "hopeful"] and bench.engine.cache.num_dropped == 1
    assert isinstance(answers["everything"].end, Done) and isinstance(answers["hopeful"].end, Done)
    bench.assert_baseline()


def test_who_hoped_for_a_prefix_whose_step_failed_is_asked(make_bench, checkpoint, monkeypatch):
    bench = make_bench(rows=1, debug=False)
    runner = bench.engine.stepper.runner
    encode = runner._encode_crops

    def broken(crops):
        monkeypatch.setattr(runner, "_encode_crops", encode)  # the first time only
        raise RuntimeError("no such picture")

    monkeypatch.setattr(runner, "_encode_crops", broken)
    for key in ("bad", "hopeful"):
        bench.submit(*request(key, checkpoint, 2, picture="wide", task="caption", max_tokens=2))
    answers = bench.drain()
    assert answers["bad"].reason == "INTERNAL" and isinstance(answers["hopeful"].end, Done)
    assert bench.asked == ["bad", "hopeful"]
    bench.assert_baseline()


def test_tokens_leave_before_a_prefill_is_launched(make_bench, checkpoint, monkeypatch):
    """Its launch takes a host milliseconds; what was committed in the same tick does not wait for them."""
    bench = make_bench()
    waiting: list[int] = []
    launch = bench.engine.stepper.launch

    def noting(step, plan, samples):
        if plan.kind == "prefill":
            waiting.append(sum(len(messages) for messages in bench.engine.book._outbox.values()))
        launch(step, plan, samples)

    monkeypatch.setattr(bench.engine.stepper, "launch", noting)
    bench.submit(*request("running", checkpoint, 1, task="query", picture="none", reasoning=False, max_tokens=40))
    while len(bench.answers.get("running", Answer()).ids) < 3:
        bench.tick()
    for i in range(4):
        bench.submit(*request(f"r{i}", checkpoint, i, task="query", picture="none", max_tokens=3))
        bench.tick()
    bench.drain()
    assert len(waiting) > 2 and not any(waiting)


def test_a_failing_step_fails_its_requests_and_the_loop_lives(make_bench, checkpoint, monkeypatch):
    bench = make_bench(debug=False)
    runner = bench.engine.stepper.runner
    encode = runner._encode_crops

    def broken(crops):
        if len(crops) > 5:
            raise RuntimeError("no such picture")
        return encode(crops)

    monkeypatch.setattr(runner, "_encode_crops", broken)
    running, name = request("running", checkpoint, 1, task="query", picture="tiny", reasoning=False, max_tokens=20)
    bench.engine.stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)
    bench.submit(running, name)
    for _ in range(5):
        bench.tick()
    for i in range(3):
        bench.submit(*request(f"bad{i}", checkpoint, i, picture="tiles"))
    answers = bench.drain()
    assert {answers[f"bad{i}"].reason for i in range(3)} == {"INTERNAL"}
    assert answers["running"].reason == "length" and len(answers["running"].ids) == 20
    bench.submit(*request("after", checkpoint, 5, picture="tall", task="caption"))
    assert isinstance(bench.drain()["after"].end, Done)
    bench.assert_baseline()


def test_deadlines_end_the_queued_and_the_running(make_bench, checkpoint, monkeypatch):
    """The clock is put forward when one runs, however long that took."""
    bench = make_bench(rows=1)
    bench.engine.stepper.runner.rows.forbid(bench.engine.config.tokenizer.eos_id)
    for key in ("running", "queued"):
        submit, name = request(key, checkpoint, 1, task="query", reasoning=False, max_tokens=400, max_time_ms=600_000.0)
        bench.submit(submit, name)
    while not bench.answers.get("running", Answer()).ids:
        bench.tick()
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 600)
    answers = bench.drain()
    assert answers["running"].reason == answers["queued"].reason == "deadline"
    assert 0 < len(answers["running"].ids) < 400 and not answers["queued"].ids
    bench.assert_baseline()


def test_a_client_that_goes_takes_its_requests_along(make_bench, checkpoint):
    bench = make_bench(rows=2)
    for i in range(6):
        bench.submit(*request(f"r{i}", checkpoint, i))
    for _ in range(3):
        bench.tick()
    bench.engine.drop_client(CLIENT)
    bench.drain()
    assert all(answer.end is not None for answer in bench.answers.values())
    bench.assert_baseline()


class OnePerPosition:
    """A host grammar that allows exactly one id at each position, and another one for each request."""

    failure = ""
    failure_code = "INTERNAL"

    def __init__(self, first: int) -> None:
        self.legal = first
        self.asked = 0

    def fill(self, line: np.ndarray) -> None:
        self.asked += 1
        line[:] = 0
        bit = 1 << (self.legal % 32)
        line[self.legal // 32] = bit if bit < 2**31 else bit - 2**32

    def advance(self, token: int) -> None:
        assert token == self.legal, "another row's mask was applied, or a mask came late"
        self.legal = 20 + (self.legal * 7 + 1) % 300


@pytest.mark.parametrize("overlap", [True, False])
def test_host_grammars_are_masked_by_their_own_state(make_bench, checkpoint, overlap):
    """One legal id per position, mixed with free rows, joining and leaving each step; zombies are never asked."""
    grammars: dict[str, OnePerPosition] = {}

    def matcher_for(submit):
        if submit.task == "query" and not submit.reasoning and submit.request_id.endswith("g"):
            return grammars.setdefault(submit.request_id, OnePerPosition(20 + len(grammars) * 13))
        return None

    free = {}
    bench = make_bench(overlap=False)
    for i in range(6):
        bench.submit(*request(f"r{i}", checkpoint, i))
    free = {key: answer.told for key, answer in bench.drain().items()}
    bench = make_bench(overlap=overlap, rows=5, matcher_for=matcher_for)
    for i in range(6):
        bench.submit(*request(f"r{i}", checkpoint, i))
        bench.submit(*request(f"r{i}g", checkpoint, i, task="query", reasoning=False, max_tokens=3 + i))
        bench.tick()
    bench.cancel("r5g")
    answers = bench.drain()
    for key, told in free.items():
        assert answers[key].told == told
    for key, grammar in grammars.items():
        expected, legal = [], 20 + list(grammars).index(key) * 13
        for _ in answers[key].ids:
            expected.append(legal)
            legal = 20 + (legal * 7 + 1) % 300
        assert answers[key].ids == expected
        assert grammar.asked <= len(answers[key].ids) + 1
    assert sum(len(answers[key].ids) for key in grammars) > 15
    bench.assert_baseline()


class Sentinel:
    """A host grammar that forbids eos and marks each mask that it writes."""

    failure = ""
    failure_code = "INTERNAL"

    def __init__(self, eos_id: int) -> None:
        self.eos_id = eos_id
        self.asked = 0

    def fill(self, line: np.ndarray) -> None:
        self.asked += 1
        line[:] = -1
        line[self.eos_id // 32] &= ~(1 << self.eos_id % 32)
        line[-1] = self.asked

    def advance(self, token: int) -> None:
        pass


@pytest.mark.parametrize("waits", [True, False])
def test_a_mask_is_not_written_over_before_it_has_gone_up(make_bench, checkpoint, monkeypatch, waits):
    """P3, for a buffer that the host writes: with late copies, what each upload finds in its slot is what was written
    for its step. Without the commit's wait, the proof that this can fail, it finds the mask of a later one."""
    written, found = [], []
    sample_masked, upload_mask = Stepper.sample_masked, DecodeSlot.upload_mask

    def noting(stepper, step):
        written.append(int(stepper.slots[step.slot].host_mask[0, -1]))
        sample_masked(stepper, step)

    def seeing(slot, number):
        found.append(int(slot.host_mask[0, -1]))
        upload_mask(slot, number)

    monkeypatch.setattr(Stepper, "sample_masked", noting)
    monkeypatch.setattr(DecodeSlot, "upload_mask", seeing)
    if not waits:
        monkeypatch.setattr("photon_backend.engine.streams.HostEvent.wait", lambda event: None)
    eos_id = load_config(checkpoint).tokenizer.eos_id
    bench = make_bench(
        debug=False,
        matcher_for=lambda submit: Sentinel(eos_id),
        delay=lambda stream: time.sleep(0.01 * (stream == "copy")),
    )
    bench.submit(*request("r", checkpoint, 1, task="query", picture="none", reasoning=False, max_tokens=20))
    bench.drain()
    bench.engine.stepper.copy.close()
    assert written == list(range(1, 21))
    assert (found == written) == waits


def test_a_grammar_without_a_legal_token_fails_its_request_only(make_bench, checkpoint):
    class Dead(OnePerPosition):
        def fill(self, line: np.ndarray) -> None:
            super().fill(line)
            if self.asked > 2:
                line[:] = 0

    bench = make_bench(matcher_for=lambda submit: Dead(30) if submit.request_id == "dead" else None)
    bench.submit(*request("dead", checkpoint, 1, task="query", reasoning=False, max_tokens=20))
    bench.submit(*request("good", checkpoint, 2, task="caption"))
    answers = bench.drain()
    assert answers["dead"].reason == "INTERNAL" and len(answers["dead"].ids) == 2
    assert isinstance(answers["good"].end, Done)
    bench.assert_baseline()


def test_the_thread_answers_everything_and_stops(checkpoint):
    bench = Bench(checkpoint, rows=4)
    bench.engine.start()
    for i in range(20):
        bench.submit(*request(f"r{i}", checkpoint, i))
    for _ in range(20):
        assert bench.ended.acquire(timeout=60)
    deadline = time.monotonic() + 60
    while (status := bench.engine.status()).rows_in_use or status.submitted < 20:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert (status.submitted, status.running) == (20, 0)
    assert status.steps_overlapped > 0
    long, name = request("long", checkpoint, 1, task="query", reasoning=False, max_tokens=1900, temperature=1.2)
    bench.submit(long, name)
    bench.engine.stop()
    assert bench.answers["long"].end is not None
    assert bench.engine.failure is None


def test_a_broken_tick_answers_everything_unavailable(checkpoint, monkeypatch):
    bench = Bench(checkpoint, rows=2)
    bench.deliver = False
    for i in range(4):
        bench.submit(*request(f"r{i}", checkpoint, i))
    asked = threading.Event()
    inner = bench.engine._emit

    def emit(client, messages):
        inner(client, messages)
        if any(isinstance(m, NeedPicture) for m in messages):
            asked.set()

    bench.engine._emit = emit
    bench.engine.start()
    assert asked.wait(60)

    def broken(step_index):
        raise RuntimeError("bug")

    monkeypatch.setattr(bench.engine.scheduler, "plan", broken)
    bench.bring(bench.asked[0])
    bench.engine._thread.join(60)
    assert isinstance(bench.engine.failure, RuntimeError)
    assert {answer.reason for answer in bench.answers.values()} == {"UNAVAILABLE"}


@pytest.mark.parametrize(
    ("error", "ends"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
    ],
    ids=["cuda", "kernel", "memory"],
)
def test_a_device_that_is_lost_ends_the_engine(checkpoint, monkeypatch, error, ends):
    """No later call on it can succeed, so every open request is told so at once. Without a GPU it is played: the error
    is raised in a step, and the engine believes that it has one. Memory that is missing costs the step only."""
    bench = Bench(checkpoint, rows=2)
    for i in range(3):
        bench.submit(*request(f"r{i}", checkpoint, i, task="query", reasoning=False, max_tokens=20))
    bench.tick()
    monkeypatch.setattr(bench.engine, "settings", replace(bench.engine.settings, device="cuda"))
    read, failed = bench.engine.stepper.read, []

    def broken(step):
        if not failed:
            failed.append(step)
            raise error
        return read(step)

    monkeypatch.setattr(bench.engine.stepper, "read", broken)
    bench.engine.start()
    for _ in range(3):
        assert bench.ended.acquire(timeout=60)
    bench.engine.stop()
    reasons = {answer.reason for answer in bench.answers.values()}
    assert failed and (bench.engine.failure is error) == ends
    assert reasons == {"UNAVAILABLE"} if ends else "INTERNAL" in reasons and "UNAVAILABLE" not in reasons
