"""Settings of a server or an in-process engine, read once from the environment (`PHOTON_*`).

The launcher sets the variables; front ends and the engine process inherit them. What the launcher itself reads is in
serve.py and layout.py.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

TINY_CHECKPOINT = Path(__file__).parent / "tiny" / "checkpoint"


# checked when they come from the environment, so that the launcher can say which one is wrong
Positive = Annotated[int, Meta(ge=1)]
ZeroOrMore = Annotated[int, Meta(ge=0)]


class Settings(msgspec.Struct, frozen=True):
    checkpoint: str = str(TINY_CHECKPOINT)  # directory with config.json, model.safetensors, tokenizer.json
    device: Annotated[str, Meta(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    dtype: Annotated[str, Meta(pattern="^(float32|bfloat16)$")] = "float32"
    threads: ZeroOrMore = 0  # torch threads of the engine process on a CPU; 0: torch's default
    run_dir: str = ""  # private directory (0700) of the sockets; the launcher makes it
    engine_python: str = ""  # interpreter of the engine process; empty: the stub's own
    engines: Positive = 1  # engine processes, one socket each
    log_level: Annotated[str, Meta(pattern="^(error|warning|info|verbose)$")] = "warning"

    overlap: bool = True  # False: commit right after finalize, the blocking mode
    graphs: bool = True  # on a GPU: CUDA graphs of the decode step, of short prefills and of the vision encoder
    kernels: bool = True  # on a GPU: our kernels where they can run; False: plain torch
    debug: bool = False  # poison relay cells and freed pages, assert on every read
    rows: Positive = 32  # sequences that run at once
    page_size: Positive = 16  # positions in a KV page
    pages: ZeroOrMore = 0  # KV pages; 0: twice `rows` full contexts, within 2 GiB on a CPU and kv_fraction on a GPU
    kv_fraction: Annotated[float, Meta(gt=0, le=1)] = 0.8  # of the GPU's memory for weights and KV together
    grammar_mb: ZeroOrMore = 64  # device memory for the tables of regular grammars
    max_waiting: Positive = 256  # requests in the engine that have no row yet; more are refused
    prefix_cache: bool = True  # keep image prefixes for later requests with the same picture
    prefill_tokens: Positive = 4096  # packed tokens of one prefill step, unless a single request needs more
    prefill_crops: Positive = 32  # crops of one prefill step, likewise
    # how long running rows may wait for one prefill step, as predicted; a step of a single sequence may take longer
    max_decode_gap_ms: Annotated[float, Meta(ge=0)] = 50.0
    beat_ms: Annotated[float, Meta(gt=0, le=1000)] = 200.0  # heartbeat period
    # a tick that takes longer ends the engine; 0: 15 s, on a CPU and 200 s more for each billion weights
    tick_limit_s: Annotated[float, Meta(ge=0)] = 0.0
    # without a word for so long a front end counts as hung; one that ended is noticed at once
    client_silence_s: Annotated[float, Meta(gt=0)] = 30.0

    max_image_bytes: Positive = 20 * 1024 * 1024  # encoded
    max_image_pixels: Positive = 50_000_000  # read from the header, before decoding
    max_open_requests: Positive = 256  # of one front end; more are refused
    waiting_pictures: Positive = 8  # pictures of the largest size that may wait in a front end; more are refused
    decode_threads: Positive = 2  # threads of a front end that decode pictures


def read_settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Settings from `PHOTON_<FIELD>` variables. Raises ValueError naming the variable that does not fit."""
    values: dict[str, object] = {}
    for field in msgspec.structs.fields(Settings):
        name = f"PHOTON_{field.name.upper()}"
        text = environ.get(name)
        if text is None:
            continue
        try:
            values[field.name] = msgspec.convert(
                _boolean(text) if field.type is bool else text, field.type, strict=False
            )
        except msgspec.ValidationError as error:
            raise ValueError(f"{name}={text!r}: {error}") from error
    return Settings(**values)  # type: ignore[arg-type]


OF_LAUNCHER = ("checkpoint", "device", "dtype", "engines", "log_level")  # options of its own, which set the variables
_OF_SERVICE = re.compile("SERVICE_|PORT(_|$)")  # Kubernetes tells every container of a service named photon


def idle_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """A sentence about each `PHOTON_*` variable in the launcher's environment that has no effect."""
    names = {field.name.upper(): field.name for field in msgspec.structs.fields(Settings)}
    sentences = []
    for name in sorted(v.removeprefix("PHOTON_") for v in environ if v.startswith("PHOTON_")):
        if names.get(name) in OF_LAUNCHER:
            sentences.append(f"PHOTON_{name} has no effect on the launcher, which takes {name}")
        elif name not in names and not _OF_SERVICE.match(name):
            near = "".join(f"; is PHOTON_{other} meant?" for other in difflib.get_close_matches(name, names, 1))
            sentences.append(f"PHOTON_{name} is no setting and has no effect{near}")
    return sentences


def _boolean(text: str) -> object:
    return {"1": True, "true": True, "0": False, "false": False}.get(text.lower(), text)
