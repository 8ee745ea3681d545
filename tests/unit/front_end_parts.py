"""What the front-end tests share: a small checkpoint without weights, and pictures as bytes. No torch."""

from __future__ import annotations

import atexit
import functools
import io
import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import HealthCheck, settings
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from photon_backend.config import Settings
from photon_backend.frontend.session import FrontEnd
from photon_backend.model.config import (
    CaptionTemplate,
    ModelConfig,
    SpanTemplate,
    Templates,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)
from photon_backend.model.tokenizer import TextTokenizer

fuzz = settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])  # never by the clock

SPECIAL = ["<eos>", "<1>", "<2>", "<answer>", "<think>", "<coord>", "<size>", "<ground>", "<8>", "<end-ground>"]
IDS = TokenizerConfig(
    templates=Templates(
        caption=CaptionTemplate([1, 20, 3], [1, 21, 3], [1, 22, 3]),
        query=SpanTemplate([1, 30, 2], [3]),
        detect=SpanTemplate([1, 31, 2], [3]),
        point=SpanTemplate([1, 32, 2], [3]),
    )
)
CONFIG = ModelConfig(
    text=TextConfig(max_context=128, vocab_size=400),
    vision=VisionConfig(crop_size=56, enc_patch_size=14, overlap_margin=1, max_crops=4),
    tokenizer=IDS,
)
CORPUS = [
    "the red square is left of the blue circle, and there is a word on it",
    "日本語の文字と 한국어 글자",
    "😀😁😂🤣👩‍👩‍👧‍👦🇩🇪 naïve café e\u0301\u0323",
]


@functools.cache
def checkpoint() -> Path:
    """A directory with config.json and a byte-level tokenizer.json, some of whose tokens end inside a character."""
    directory = Path(tempfile.mkdtemp())
    atexit.register(shutil.rmtree, directory)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_config(directory, CONFIG)
    return directory


def write_config(directory: Path, config: ModelConfig) -> None:
    (directory / "config.json").write_bytes(msgspec.json.encode(config))


@functools.cache
def front_end() -> FrontEnd:
    return FrontEnd(Settings(checkpoint=str(checkpoint())))


def tokenizer() -> TextTokenizer:
    return front_end().tokenizer


@functools.cache
def _id_of_byte() -> dict[int, int]:
    """The alphabet of a byte-level vocabulary: printable bytes stand for themselves, the others follow from 256 on."""
    vocabulary = Tokenizer.from_file(str(checkpoint() / "tokenizer.json")).get_vocab()
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    spelling = {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return {byte: vocabulary[character] for byte, character in spelling.items()}


def byte_ids(data: bytes) -> list[int]:
    """One id for each byte, so that every border between ids lies inside the characters that have several."""
    return [_id_of_byte()[byte] for byte in data]


def file_bytes(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def halves(size: tuple[int, int] = (60, 40), left: str = "red", right: str = "blue", mode: str = "RGB") -> Image.Image:
    """A picture whose left half has one colour and whose right half another."""
    image = Image.new("RGB", size, right)
    image.paste(left, (0, 0, size[0] // 2, size[1]))
    return image.convert(mode)
