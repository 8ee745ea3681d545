"""The made-up tokenizer of Moondream 2's shape: the server can be measured with it only if every id is text."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.checkpoints import NUM_CONTROL, made_up_tokenizer
from photon_backend.model.config import ModelConfig
from photon_backend.model.tokenizer import TextTokenizer


def test_every_id_is_text_and_questions_are_encoded(tmp_path: Path) -> None:
    size = ModelConfig().text.vocab_size
    spec = made_up_tokenizer(size)
    assert len(spec["model"]["vocab"]) == size  # type: ignore[index]
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(spec))
    tokenizer = TextTokenizer(file)
    question = "What is in the picture?"
    ids = tokenizer.encode(question)
    assert tokenizer.decode(ids) == question and len(ids) < len(question)
    pieces = [tokenizer.decode([number]) for number in range(NUM_CONTROL + 256, size, 97)]
    assert all(piece.isascii() and len(piece) >= 2 for piece in pieces)
