"""The public reference implementation on this machine, for the peer figures beside ours. Run by hand on a GPU:

    git clone https://github.com/vikhyat/moondream DIR && git -C DIR checkout 44146f1
    python -m benchmarks.reference DIR [--compile] [--repeat N]

Moondream 2's shape, our random weights (the same that the other benchmarks use), bfloat16, one request at a time, as
it works: milliseconds per token at context 736 + 64 (the difference of a long and a short answer), milliseconds to
encode an 850 x 600 picture, requests per second of the two workloads of benchmarks/requests.py. `--compile` calls its
own `compile()` first, which takes minutes. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from benchmarks.checkpoints import made_up_tokenizer
from benchmarks.requests import PICTURE, TOKENS
from photon_backend.model.config import ModelConfig
from photon_backend.model.weights import random_model

QUESTION = "What is the highest value in this chart?"
SHORT, LONG = 4, 132  # tokens of two answers whose difference is decode steps alone


def load_reference(directory: Path, device: str) -> Any:
    """Its model with our random weights. Its tokenizer, which it would download by name, is replaced."""
    sys.path.insert(0, str(directory))
    from moondream.torch import moondream  # type: ignore[import-not-found]
    from moondream.torch.config import MoondreamConfig  # type: ignore[import-not-found]

    ours = random_model(ModelConfig(), device, torch.bfloat16, seed=0)
    made_up = Tokenizer.from_str(json.dumps(made_up_tokenizer(ModelConfig().text.vocab_size)))
    moondream.Tokenizer = type("Local", (), {"from_pretrained": staticmethod(lambda name: made_up)})
    with torch.device(device):
        model = moondream.MoondreamModel(MoondreamConfig(), dtype=torch.bfloat16)
    missing, unexpected = model.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and all("kv_cache" in name for name in missing), (missing, unexpected)
    return model.requires_grad_(False)


def answer(model: Any, picture: Any, tokens: int) -> None:
    model.query(picture, QUESTION, settings={"max_tokens": tokens, "temperature": 0, "variant": None})


def median_s(work: Callable[[], object], repeat: int) -> float:
    """Seconds, the median of `repeat` calls after one that warms up. The reference reads every token, so it waits."""
    times = []
    for _ in range(repeat + 1):
        begun = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])


def measure(model: Any, repeat: int) -> dict[str, float]:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*PICTURE, 3), dtype=np.uint8))
    encoded = model.encode_image(picture, {"variant": None})
    long, short = (median_s(lambda n=n: answer(model, encoded, n), repeat) for n in (LONG, SHORT))  # type: ignore[misc]
    results = {
        "encode_ms": 1e3 * median_s(lambda: model.encode_image(picture, {"variant": None}), repeat),
        "token_ms": 1e3 * (long - short) / (LONG - SHORT),
    }
    for workload, tokens in TOKENS.items():
        seconds = median_s(lambda n=tokens: answer(model, picture, n), repeat)  # type: ignore[misc]
        results[f"{workload}_requests_per_s"] = 1 / seconds
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a checkout of the reference")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    model = load_reference(options.directory, options.device)
    seconds = 0.0
    if options.compile:
        begun = time.perf_counter()
        model.compile()
        answer(model, Image.new("RGB", PICTURE[::-1]), SHORT)
        seconds = time.perf_counter() - begun
    results = measure(model, options.repeat)
    for name, value in results.items():
        print(f"{name:>26} {value:10.2f}")
    print(json.dumps({"benchmark": "reference", "compiled": options.compile, "compile_s": seconds, **results}))


if __name__ == "__main__":
    main()
