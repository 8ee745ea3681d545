"""A grammar's tables are laid out for their upload on a compiling thread; what the engine does when it lacks them."""

from __future__ import annotations

import threading

import msgspec
from harness import Bench, request

from photon_backend.engine.constraints import Compiled
from photon_backend.engine.tables import AutomatonTables
from photon_backend.protocol import Done, GrammarSpec

SPEC = GrammarSpec("regex", "[a-z]{2,9}[0-9]{1,3}")


def submit(bench: Bench, checkpoint, name: str) -> None:
    message, picture = request(name, checkpoint, 1, task="query", reasoning=False, picture="none", max_tokens=12)
    bench.submit(msgspec.structs.replace(message, grammar=SPEC), picture)


def drain(bench: Bench) -> None:
    while bench.tick() or bench.engine.constraints.num_compiling:
        if bench.engine.constraints.num_compiling and not bench.engine.pipeline:
            bench.engine._idle()


def test_the_engine_thread_lays_out_no_tables(make_bench, checkpoint, monkeypatch):
    """Once for a grammar, for the device has them then."""
    threads: list[str] = []
    lay_out = AutomatonTables.host_words

    def host_words(tables, automaton):
        threads.append(threading.current_thread().name)
        return lay_out(tables, automaton)

    monkeypatch.setattr(AutomatonTables, "host_words", host_words)
    bench = make_bench()
    for name in ("first", "second"):
        submit(bench, checkpoint, name)
        drain(bench)
    assert len(threads) == 1 and threads[0].startswith("grammar")
    assert bench.engine.constraints.num_device == 2


def test_tables_that_are_evicted_before_their_row_comes_are_laid_out_after_all(make_bench, checkpoint, monkeypatch):
    bench = make_bench()
    constraints, tables = bench.engine.constraints, bench.engine.stepper.tables
    submit(bench, checkpoint, "first")
    drain(bench)
    delivered: list[Compiled] = []
    deliver = constraints._deliver

    def evict_first(compiled: Compiled) -> None:
        """On a compiling thread, while the engine waits for it."""
        delivered.append(compiled)
        if len(delivered) == 1:
            tables._blocks.clear()
            tables.buffer[tables._first :] = 1  # another grammar has been there
        deliver(compiled)

    monkeypatch.setattr(constraints, "_deliver", evict_first)
    submit(bench, checkpoint, "second")
    drain(bench)
    assert [compiled.words is None for compiled in delivered] == [True, False]
    assert isinstance(bench.answers["second"].end, Done)
    assert bench.answers["second"].told == bench.answers["first"].told
    assert constraints.num_device == 2
    bench.assert_baseline()
