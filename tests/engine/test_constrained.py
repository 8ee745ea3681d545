"""Constrained rows in the engine: tables on the device, matchers on the host, mixed with free rows in every state.

PHOTON_TEST_CONSTRAINED sets the number of requests of the long run (default 80; the full proof is 2000).
"""

from __future__ import annotations

import json
import os
import queue
import random
import re
import threading
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from harness import CLIENT, Bench, request
from jsonschema import Draft202012Validator
from tokenizers import Tokenizer

from photon_backend.engine.constraints import COMPILING_THREADS
from photon_backend.engine.stepper import Stepper
from photon_backend.grammar.matcher import LibraryMatcher
from photon_backend.model.config import load_config
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.protocol import Done, Failed, GrammarSpec, Submit

LONG_RUN = int(os.environ.get("PHOTON_TEST_CONSTRAINED", "80"))

COLORS = ["red", "green", "light blue", "gr\u00fcn", "\U0001f535"]
SCENE = {
    "type": "object",
    "properties": {
        "color": {"enum": COLORS},
        "count": {"type": "integer", "minimum": 0, "maximum": 120},
        "sure": {"type": "boolean"},
        "note": {"type": "string", "maxLength": 12},
    },
    "required": ["color", "count", "note"],
    "additionalProperties": False,
}
FREE_OBJECT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
LIST = {"type": "array", "items": {"type": "integer", "multipleOf": 3, "minimum": 0, "maximum": 99}, "maxItems": 4}


def schema(value) -> GrammarSpec:
    return GrammarSpec("json_schema", json.dumps(value))


DEVICE = [
    GrammarSpec("choice", json.dumps(COLORS)),
    GrammarSpec("regex", r"[0-9]{4}-[01][0-9]-[0-3][0-9]"),
    schema(SCENE),
    schema({"type": "array", "items": {"enum": COLORS}, "maxItems": 3}),
]
HOST = [
    GrammarSpec("lark", 'start: "there are " /[0-9]{1,3}/ (" red" | " blue")'),
    schema(FREE_OBJECT),
    schema(LIST),
    schema({"type": "string", "maxLength": 700}),  # regular, and too large
]


def satisfies(spec: GrammarSpec, text: str) -> bool:
    if spec.kind == "choice":
        return text in json.loads(spec.text)
    if spec.kind == "regex":
        return re.fullmatch(spec.text, text) is not None
    if spec.kind == "lark":
        return re.fullmatch(r"there are [0-9]{1,3} (red|blue)", text) is not None
    return Draft202012Validator(json.loads(spec.text)).is_valid(json.loads(text))


def constrained(name: str, checkpoint: Path, number: int, spec: GrammarSpec, **changes) -> tuple[Submit, str | None]:
    changes.setdefault("reasoning", number % 3 == 0)
    changes.setdefault("max_tokens", 40)
    submit, picture = request(name, checkpoint, number, task="query", **changes)
    return msgspec.structs.replace(submit, grammar=spec), picture


def mixed(checkpoint: Path, number: int, first: int = 0) -> list[tuple[Submit, str | None]]:
    """Free, device and host rows in turn."""
    batch = []
    for i in range(first, first + number):
        if i % 3 == 0:
            batch.append(request(f"r{i}", checkpoint, i))
        else:
            specs = DEVICE if i % 3 == 1 else HOST
            batch.append(constrained(f"r{i}", checkpoint, i, specs[i // 3 % len(specs)]))
    return batch


def drain(bench: Bench, limit: int = 20_000) -> dict:
    """Ticks until nothing is left to do; sleeps only while a grammar compiles."""
    for _ in range(limit):
        if not bench.tick():
            if not bench.engine.constraints.num_compiling:
                return bench.answers
            bench.engine._idle()
    raise AssertionError(f"not done after {limit} ticks")


def told_by(bench: Bench, batch) -> dict:
    for submit, name in batch:
        bench.submit(submit, name)
    told = {key: answer.told for key, answer in drain(bench).items()}
    assert_baseline(bench)
    return told


def assert_baseline(bench: Bench) -> None:
    bench.assert_baseline()
    assert bench.engine.stepper.tables.num_used == 0 and bench.engine.constraints.num_compiling == 0


def assert_kept(bench: Bench, batch) -> Counter:
    """Every finished answer satisfies its grammar; one that was cut says so. Counts the reasons."""
    config = load_config(Path(bench.settings.checkpoint))
    tokenizer = TextTokenizer(Path(bench.settings.checkpoint) / "tokenizer.json")
    reasons: Counter[str] = Counter()
    for submit, _ in batch:
        if submit.grammar is None:
            continue
        answer = bench.answers[submit.request_id]
        ids = answer.ids
        if submit.reasoning and config.tokenizer.answer_id in ids:
            ids = ids[ids.index(config.tokenizer.answer_id) + 1 :]
        reasons[answer.reason] += 1
        if answer.reason == "stop":
            assert satisfies(submit.grammar, tokenizer.decode(ids)), (submit.grammar, tokenizer.decode(ids))
        assert answer.reason in ("stop", "length", "cancelled")
    return reasons


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict:
    """Each request by itself, blocking."""
    told = {}
    for submit, name in mixed(checkpoint, 27):
        bench = Bench(checkpoint, overlap=False, prefix_cache=False)
        told |= told_by(bench, [(submit, name)])
        bench.close()
    return told


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows", [3, 27])
def test_a_batch_and_overlap_change_nothing(make_bench, checkpoint, alone, overlap, rows):
    bench = make_bench(overlap=overlap, rows=rows)
    batch = mixed(checkpoint, 27)
    assert told_by(bench, batch) == alone
    assert assert_kept(bench, batch)["stop"] > 9
    status = bench.engine.snapshot()
    assert (status.constrained_device, status.constrained_host, status.constrained_fallback) == (9, 9, 2)
    assert bool(status.steps_deferred) == overlap  # blocking, a matcher is never behind


@pytest.mark.parametrize("seed", range(3))
def test_rows_join_leave_and_are_cancelled(make_bench, checkpoint, alone, seed):
    chance = random.Random(seed)
    lag = chance.choice(["compute", "copy", "none"])

    def delay(stream: str) -> None:
        if stream == lag and chance.random() < 0.3:
            time.sleep(0.002)

    bench = make_bench(rows=3, pages=chance.choice([40, 400]), delay=delay)
    pending = mixed(checkpoint, 27)
    chance.shuffle(pending)
    cancelled = set(chance.sample(sorted(alone), 9))
    for submit, name in pending:
        bench.submit(submit, name)
        for _ in range(chance.randint(0, 3)):
            bench.tick()
        for key in [k for k in cancelled if k in bench.answers and chance.random() < 0.2]:
            bench.cancel(key)
    for key in cancelled:
        bench.cancel(key)
    answers = drain(bench)
    for key, told in alone.items():
        if key not in cancelled:
            assert answers[key].told == told
        elif answers[key].reason == "cancelled":
            assert answers[key].ids == told[0][: len(answers[key].ids)]
    assert_kept(bench, pending)
    assert_baseline(bench)


def test_automaton_and_matcher_give_the_same_tokens(make_bench, checkpoint):
    batch = [constrained(f"r{i}", checkpoint, i, DEVICE[i % len(DEVICE)]) for i in range(16)]
    device, host = make_bench(), make_bench(grammar_mb=0)
    assert told_by(device, batch) == told_by(host, batch)
    assert (device.engine.constraints.num_device, host.engine.constraints.num_host) == (16, 16)
    assert device.engine._deferred == 0 and host.engine._deferred > 0


@pytest.mark.parametrize("lag", ["compute", "copy"])
def test_a_late_stream_changes_nothing(make_bench, checkpoint, alone, lag):
    bench = make_bench(delay=lambda stream: time.sleep(0.002 * (stream == lag)))
    assert told_by(bench, mixed(checkpoint, 27)) == alone


@pytest.mark.parametrize("waits", [True, False])
def test_a_first_step_waits_for_tables_that_come_late(make_bench, checkpoint, monkeypatch, waits):
    """The copy stream is held until the compute stream has passed the first sampling. An engine that waits never gets
    there, so it is let go after a second; without the wait, which is the proof that this test can fail, the first step
    reads tables that have not landed."""
    if not waits:
        monkeypatch.setattr(Stepper, "_wait_for_tables", lambda stepper, admissions: None)
    started: list[str] = []
    sampled = threading.Event()

    def delay(stream: str) -> None:
        if stream == "copy":
            sampled.wait(1 if waits else 60)
        else:
            started.append(stream)
            if len(started) == 3:  # prefill, sample, and now the next forward; or prefill, wait, and now sample
                sampled.set()

    bench = make_bench(debug=False, delay=delay)
    tables = bench.engine.stepper.tables
    tables.buffer[tables._first :] = 1  # tables of another grammar, as it were
    batch = [constrained("r", checkpoint, 1, DEVICE[0], reasoning=False, picture="none", temperature=0.0)]
    told = told_by(bench, batch)
    assert (told == told_by(make_bench(), batch)) == waits


@pytest.mark.parametrize("specs", [DEVICE, HOST], ids=["device", "host"])
@pytest.mark.parametrize("number", [1, 5])
def test_an_answer_that_is_cut_says_length(make_bench, checkpoint, specs, number):
    bench = make_bench()
    for i, spec in enumerate(specs):
        bench.submit(*constrained(f"r{i}", checkpoint, i, spec, reasoning=False, max_tokens=number))
    answers = drain(bench)
    reasons = {answer.reason for answer in answers.values()}
    assert reasons <= {"length", "stop"} and "length" in reasons
    assert all(len(a.ids) == number for a in answers.values() if a.reason == "length")


def test_one_legal_token_per_position(make_bench, checkpoint):
    """Every row has a grammar of exactly one text, another one each, spelled letter by letter or by longer tokens."""
    tokenizer = TextTokenizer(checkpoint / "tokenizer.json")
    bench = make_bench(rows=5)
    texts = {f"r{i}": f"{i} is {'not ' * (i % 3)}number {i * 7}." for i in range(12)}
    for i, (key, text) in enumerate(texts.items()):
        kind = GrammarSpec("choice", json.dumps([text])) if i % 2 else GrammarSpec("lark", f"start: {json.dumps(text)}")
        bench.submit(*constrained(key, checkpoint, i, kind, temperature=1.2, top_p=1.0))
        bench.submit(*request(f"free{i}", checkpoint, i))
        bench.tick()
    answers = drain(bench)
    answer_id = bench.engine.config.tokenizer.answer_id
    for i, (key, text) in enumerate(texts.items()):
        ids = answers[key].ids
        if i % 3 == 0:
            ids = ids[ids.index(answer_id) + 1 :]
        assert tokenizer.decode(ids) == text and answers[key].reason == "stop"
    assert_baseline(bench)


def test_a_mask_is_asked_once_per_token_and_never_for_a_zombie(make_bench, checkpoint, monkeypatch):
    asked: Counter[int] = Counter()
    advanced: Counter[int] = Counter()
    alive = []
    fill_many, advance = LibraryMatcher.fill_many, LibraryMatcher.advance

    def counting_fill(pairs, mask):
        for matcher, _ in pairs:
            alive.append(matcher)  # so that no identity is used twice
            asked[id(matcher)] += 1
            assert asked[id(matcher)] == advanced[id(matcher)] + 1
        fill_many(pairs, mask)

    def counting_advance(matcher, token):
        advanced[id(matcher)] += 1
        advance(matcher, token)

    monkeypatch.setattr(LibraryMatcher, "fill_many", staticmethod(counting_fill))
    monkeypatch.setattr(LibraryMatcher, "advance", counting_advance)
    bench = make_bench(rows=4)
    batch = [constrained(f"r{i}", checkpoint, i, HOST[i % len(HOST)]) for i in range(16)]
    for submit, name in batch:
        bench.submit(submit, name)
        bench.tick()
    bench.cancel("r5")
    drain(bench)
    assert len(asked) >= 15 and sum(asked.values()) > 100
    assert_baseline(bench)


def test_a_matcher_that_stops_fails_its_request_with_the_reason(make_bench, checkpoint, monkeypatch):
    bench = make_bench()
    bench.submit(*constrained("bad", checkpoint, 1, HOST[0], reasoning=False))
    bench.submit(*constrained("good", checkpoint, 2, HOST[1], reasoning=False))
    advance = LibraryMatcher.advance
    bad = []

    def breaking(matcher, token):
        if not bad and matcher._matcher.compute_ff_bytes() != b"":  # r"there are ": the first matcher of HOST[0]
            bad.append(matcher)
            token = bench.engine.config.tokenizer.coord_id
        advance(matcher, token)

    monkeypatch.setattr(LibraryMatcher, "advance", breaking)
    answers = drain(bench)
    failed = [key for key, answer in answers.items() if isinstance(answer.end, Failed)]
    assert len(failed) == len(bad) == 1
    end = answers[failed[0]].end
    assert end.code == "INTERNAL" and end.message.startswith("the grammar allows no further token: ")
    assert "\n" not in end.message
    assert_baseline(bench)


DEAD_ENDS = [  # each after "ab", or after more of it
    (GrammarSpec("lark", 'start: "ab" D\nD: /x/ & /y/'), {"ab"}),
    (GrammarSpec("lark", 'start: "ab" b | "abc" b\nb: /[^\\x00-\\u{10ffff}]/'), {"ab", "abc"}),
]


@pytest.mark.parametrize(("spec", "ends"), DEAD_ENDS, ids=["expression", "rule"])
def test_a_grammar_that_cannot_go_on_after_a_prefix_fails_alone(make_bench, checkpoint, spec, ends):
    """The library compiles it; only on the way is it seen that nothing may follow."""
    bench = make_bench(rows=5)
    bench.submit(*constrained("dead", checkpoint, 1, spec, reasoning=False))
    neighbours = [constrained(f"r{i}", checkpoint, i, other) for i, other in enumerate(HOST)]
    for submit, name in neighbours:
        bench.submit(submit, name)
    answer = drain(bench)["dead"]
    end = answer.end
    assert isinstance(end, Failed) and end.code == "INVALID_ARG"
    assert end.message == "the grammar allows no further token: no answer satisfies it"
    assert TextTokenizer(checkpoint / "tokenizer.json").decode(answer.ids) in ends
    assert sum(assert_kept(bench, neighbours).values()) == len(HOST)
    assert_baseline(bench)


AMBIGUOUS = GrammarSpec("lark", "start: a+ d{2000}\na: b+\nb: c+\nc: d+\nd: /[ -}]/")


@pytest.mark.parametrize(("max_items", "says"), [(50_000, "too slow to follow"), (1_000, "Too many items")])
def test_a_grammar_too_slow_to_follow_fails_alone(make_bench, checkpoint, monkeypatch, max_items, says):
    """Its masks take ever longer, and everybody waits for them. Time is the processor's and the work without end, so
    what else the machine does decides nothing here; the neighbours' masks are looked at as closely."""
    monkeypatch.setattr("photon_backend.grammar.matcher.SLOW_BATCH_S", 0.0)
    monkeypatch.setattr("photon_backend.grammar.matcher.MAX_ITEMS", max_items)
    bench = make_bench(rows=5)
    bench.submit(*constrained("slow", checkpoint, 1, AMBIGUOUS, reasoning=False, picture="none", max_tokens=400))
    neighbours = [constrained(f"r{i}", checkpoint, i, spec) for i, spec in enumerate(HOST)]
    for submit, name in neighbours:
        bench.submit(submit, name)
    end = drain(bench)["slow"].end
    assert isinstance(end, Failed) and end.code == "INVALID_ARG" and says in end.message and len(end.message) < 300
    assert sum(assert_kept(bench, neighbours).values()) == len(HOST)
    assert_baseline(bench)


BAD = [GrammarSpec("regex", "("), schema({"type": "strin"}), GrammarSpec("lark", "start: b")]


@pytest.mark.parametrize("bad", BAD, ids=lambda spec: spec.text)
def test_a_grammar_that_does_not_compile_fails_alone(make_bench, checkpoint, bad):
    bench = make_bench()
    for i, spec in enumerate([DEVICE[0], bad, HOST[0]]):
        bench.submit(*constrained(f"r{i}", checkpoint, i + 1, spec, picture="wide"))
    answers = drain(bench)
    assert answers["r1"].reason == "INVALID_ARG" and not answers["r1"].ids
    assert isinstance(answers["r0"].end, Done) and isinstance(answers["r2"].end, Done)
    assert_baseline(bench)


@pytest.mark.parametrize("how", ["cancel", "gone", "deadline"])
def test_a_request_may_end_while_its_grammar_compiles(make_bench, checkpoint, monkeypatch, how):
    bench = make_bench()
    held = []
    monkeypatch.setattr(bench.engine.constraints, "_deliver", held.append)
    submit, name = constrained("r", checkpoint, 1, DEVICE[2], picture="wide", max_time_ms=30.0 * (how == "deadline"))
    bench.submit(submit, name)
    bench.tick()
    assert bench.asked == ["r"]  # the picture comes meanwhile
    if how == "cancel":
        bench.cancel("r")
    elif how == "gone":
        bench.engine.drop_client(CLIENT)
    else:
        time.sleep(0.05)
    bench.tick()
    assert bench.answers["r"].reason == ("deadline" if how == "deadline" else "cancelled")
    bench.engine.constraints._pool.shutdown(wait=True)
    (compiled,) = held
    bench.engine._put(b"", compiled, None)
    drain(bench)
    assert_baseline(bench)


def test_the_grammar_of_a_request_that_has_ended_is_not_compiled(make_bench, checkpoint, monkeypatch):
    """Else one client could hold up everybody's grammars for minutes, with requests that it has long cancelled."""
    bench, go, compiled = make_bench(), threading.Event(), []
    grammars = bench.engine.constraints._grammars
    compile_ = grammars.compile

    def slow(spec):
        assert go.wait(60)
        compiled.append(spec.text)
        return compile_(spec)

    monkeypatch.setattr(grammars, "compile", slow)
    for i in range(8):
        spec = GrammarSpec("choice", f'["a{i}","b"]')
        bench.submit(*constrained(f"r{i}", checkpoint, i, spec, picture="none"))
    bench.tick()
    for i in range(1, 7):
        bench.cancel(f"r{i}")
    bench.tick()
    go.set()
    answers = drain(bench)
    assert isinstance(answers["r0"].end, Done) and isinstance(answers["r7"].end, Done)
    assert len(compiled) <= COMPILING_THREADS + 1 and {'["a0","b"]', '["a7","b"]'} <= set(compiled)
    assert_baseline(bench)


def test_one_that_compiles_holds_up_nobody(make_bench, checkpoint, monkeypatch):
    bench = make_bench()
    held = []
    deliver = bench.engine.constraints._deliver
    monkeypatch.setattr(bench.engine.constraints, "_deliver", held.append)
    bench.submit(*constrained("slow", checkpoint, 1, DEVICE[0], picture="none"))
    bench.submit(*request("quick", checkpoint, 2, task="caption", max_tokens=4))
    while bench.tick():
        pass
    assert isinstance(bench.answers["quick"].end, Done) and "slow" not in bench.answers
    bench.engine.constraints._pool.shutdown(wait=True)
    deliver(held[0])
    assert isinstance(drain(bench)["slow"].end, Done)


def test_more_grammars_than_room_are_evicted_or_fall_back(make_bench, checkpoint, monkeypatch):
    """One after another they take each other's room, while another row runs; all at once, those without room take a
    matcher, and are counted."""
    bench = make_bench(rows=6)
    engine, tables = bench.engine, bench.engine.stepper.tables
    tables.num_words = tables._first + 12_000
    specs = [GrammarSpec("regex", f"[a-z]{{2,9}}x{i}[0-9]{{1,{i % 3 + 1}}}") for i in range(24)]
    one_by_one = [constrained(f"a{i}", checkpoint, i, spec, reasoning=False) for i, spec in enumerate(specs)]
    at_once = [constrained(f"b{i}", checkpoint, i, spec, reasoning=False) for i, spec in enumerate(specs)]
    for submit, name in one_by_one:
        bench.submit(*request(f"free {submit.request_id}", checkpoint, 7))
        bench.submit(submit, name)
        while submit.request_id not in bench.answers or bench.answers[submit.request_id].end is None:
            if not bench.tick():
                engine._idle()
    assert len(tables._blocks) < len(specs) and engine.constraints.num_device == len(specs)
    for submit, name in at_once:
        bench.submit(submit, name)
    compiled: queue.SimpleQueue = queue.SimpleQueue()
    deliver = engine.constraints._deliver
    monkeypatch.setattr(engine.constraints, "_deliver", compiled.put)
    bench.tick()
    held = [compiled.get(timeout=60) for _ in specs]  # all are compiled before one is placed
    monkeypatch.setattr(engine.constraints, "_deliver", deliver)
    for one in held:
        deliver(one)
    drain(bench)
    assert assert_kept(bench, one_by_one + at_once)["stop"] > 30
    status = engine.status()
    assert status.constrained_device + status.constrained_host == 2 * len(specs)
    assert 0 < status.constrained_fallback == status.constrained_host < len(specs)
    assert_baseline(bench)


def test_seed_and_temperature_count_for_constrained_rows(make_bench, checkpoint):
    """Options give the same tokens blocking and overlapped, and other ones than the default."""
    told = {}
    for name, changes in (("default", {}), ("seed", {"seed": 99}), ("greedy", {"temperature": 0.0})):
        options = {
            "temperature": 1.5,
            "top_p": 1.0,
            "top_k": 0,
            "seed": 1,
            "reasoning": False,
            "max_tokens": 12,
        } | changes
        batch = [constrained(f"r{i}", checkpoint, i, spec, **options) for i, spec in enumerate(DEVICE + HOST)]
        told[name] = told_by(make_bench(), batch)
        assert told_by(make_bench(overlap=False), batch) == told[name]
    assert told["default"] != told["seed"] != told["greedy"] != told["default"]


def test_every_finished_answer_parses_and_validates(make_bench, checkpoint):
    bench = make_bench(rows=16, pages=2000, debug=False, dtype="float32", max_waiting=LONG_RUN)
    batch = mixed(checkpoint, LONG_RUN, first=1000)
    for submit, name in batch:
        bench.submit(submit, name)
    drain(bench, 100 * LONG_RUN)
    reasons = assert_kept(bench, batch)
    print(f"{LONG_RUN} requests: {dict(reasons)}")
    assert reasons["stop"] > LONG_RUN / 4
    assert_baseline(bench)


def test_constrained_rows_use_masks_of_the_padded_vocabulary(make_bench, checkpoint):
    bench = make_bench()
    assert bench.engine.stepper.slots[0].host_mask.numpy().dtype == np.int32
    batch = [
        constrained(f"r{i}", checkpoint, i, GrammarSpec("regex", ".{3,30}"), reasoning=False, temperature=1.9)
        for i in range(6)
    ]
    told_by(bench, batch)
    used = {token for answer in bench.answers.values() for token in answer.ids}
    assert max(used) < Tokenizer.from_file(str(checkpoint / "tokenizer.json")).get_vocab_size()
