"""A checkpoint directory of a given shape with random weights, for measurements through the whole server.

    python -m benchmarks.checkpoints DIR [--shape moondream2|tiny] [--device cpu|cuda] [--dtype float32|bfloat16]

The bundled model's shape comes with its own tokenizer. For Moondream 2's shape a byte-level BPE of its 51,200 ids is
made up, whose pieces are plain ASCII, so that every sampled token is text that can be streamed at once. Random weights
hardly ever end an answer by themselves: it has as many tokens as were asked for.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

import torch

from photon_backend.config import TINY_CHECKPOINT
from photon_backend.model.config import ModelConfig, load_config
from photon_backend.model.weights import random_model, save_checkpoint

LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # the common ones more often
NUM_CONTROL = 32  # ids at the start that spell nothing; Moondream's own lie below 10


def write_checkpoint(directory: Path, shape: str, device: str, dtype: str, seed: int = 0) -> None:
    """config.json, model.safetensors, tokenizer.json. shape: "moondream2" or "tiny"."""
    config = ModelConfig() if shape == "moondream2" else load_config(TINY_CHECKPOINT)
    save_checkpoint(random_model(config, device, getattr(torch, dtype), seed), directory)
    if shape == "moondream2":
        (directory / "tokenizer.json").write_text(json.dumps(made_up_tokenizer(config.text.vocab_size)))
    else:
        shutil.copy(TINY_CHECKPOINT / "tokenizer.json", directory)


def made_up_tokenizer(size: int) -> dict[str, object]:
    """`tokenizer.json` of a byte-level BPE with `size` ids: control tokens, 256 bytes, then made-up words of a length
    like that of real ones, with their beginnings, since a merge makes each piece from the one before and a letter."""
    from tokenizers.pre_tokenizers import ByteLevel

    control = [f"<|{number}|>" for number in range(NUM_CONTROL)]
    pieces = [*control, *sorted(ByteLevel.alphabet())]
    words: dict[str, None] = {}  # in the order of their merges
    chance = random.Random(0)
    while len(words) < size - len(pieces):
        word = "".join(chance.choices(LETTERS, range(len(LETTERS), 0, -1), k=chance.choice([2, 3, 4, 5, 6, 7, 8, 10])))
        word = chance.choice(["Ġ", "", ""]) + chance.choice([word, word.capitalize()])  # Ġ: a space, in byte-level BPE
        words |= dict.fromkeys(word[:end] for end in range(2, len(word) + 1))
    pieces += list(words)[: size - len(pieces)]
    merges = [[piece[:-1], piece[-1]] for piece in pieces[NUM_CONTROL + 256 :]]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    added = [{"id": number, "content": name} | flags for number, name in enumerate(control)]
    model = {"type": "BPE", "vocab": {piece: number for number, piece in enumerate(pieces)}, "merges": merges}
    return {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=["moondream2", "tiny"], default="moondream2")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    write_checkpoint(options.directory, options.shape, options.device, options.dtype)


if __name__ == "__main__":
    main()
