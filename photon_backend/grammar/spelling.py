"""The bytes of each token, from a checkpoint's tokenizer.json. NumPy only."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from photon_backend.model.config import ModelConfig


@dataclass(frozen=True)
class Spelling:
    """bytes uint8 [V, L], right-padded; lengths int64 [V], 0 for ids that no answer has: added, control, padding."""

    bytes: np.ndarray
    lengths: np.ndarray
    eos_id: int


def read_spelling(checkpoint: Path, config: ModelConfig) -> Spelling | None:
    """None when the tokenizer is not a byte-level one, the only kind whose tokens have bytes of their own."""
    spec = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    if (spec.get("decoder") or {}).get("type") != "ByteLevel" or not isinstance(spec["model"].get("vocab"), dict):
        return None
    byte_of = _byte_of_character()
    words: dict[int, bytes] = {}
    for piece, token in spec["model"]["vocab"].items():
        if all(c in byte_of for c in piece):
            words[token] = bytes(byte_of[c] for c in piece)
    for added in spec.get("added_tokens") or []:
        words[added["id"]] = b""
    for token in config.tokenizer.control_ids:
        words[token] = b""
    size = config.text.vocab_size
    table = np.zeros((size, max(map(len, words.values()))), np.uint8)
    lengths = np.zeros(size, np.int64)
    for token, word in words.items():
        table[token, : len(word)] = np.frombuffer(word, np.uint8)
        lengths[token] = len(word)
    return Spelling(table, lengths, config.tokenizer.eos_id)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's way to write bytes as characters: printable Latin-1 stands for itself, the rest moves beyond U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}
