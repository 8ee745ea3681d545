"""The bundled model's configuration and vocabulary: `python -m photon_backend.tiny.vocabulary DIR` writes both files.

The vocabulary is a byte-level BPE whose merges come from the questions and answers of 4,000 scenes, without the printed
texts: those are spelled letter by letter, which makes reading a picture a matter of letters. All 256 bytes are in it,
so it spells anything. Ids 0..16 are control tokens; the task names are such tokens too, so a prompt template never
contains text.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from photon_backend.model.config import (
    CaptionTemplate,
    ModelConfig,
    RegionConfig,
    SpanTemplate,
    Templates,
    TextConfig,
    TokenizerConfig,
    VisionConfig,
)
from photon_backend.tiny.question import SEE, SEE_ALL, SEE_NONE, SO
from photon_backend.tiny.questions import draw_question
from photon_backend.tiny.scenes import Scene, make_scene
from photon_backend.tiny.spatial import ABSENT

_CONTROL = (
    "<|end|> <|task|> <|input|> <|answer|> <|thinking|> <|coord|> <|size|> <|ground|> <|reserved|> <|end_ground|> "
    "<|caption|> <|query|> <|detect|> <|point|> <|short|> <|normal|> <|long|>"
)
CONTROL = tuple(_CONTROL.split())
TASK, INPUT, ANSWER, CAPTION, QUERY, DETECT, POINT, SHORT, NORMAL, LONG = 1, 2, 3, 10, 11, 12, 13, 14, 15, 16
VOCAB_SIZE = 768

CONFIG = ModelConfig(
    text=TextConfig(dim=256, ff_dim=640, n_layers=4, vocab_size=VOCAB_SIZE, max_context=1024, n_heads=4, n_kv_heads=4),
    vision=VisionConfig(
        enc_dim=192,
        enc_patch_size=8,
        enc_n_layers=6,
        enc_ff_dim=576,
        enc_n_heads=6,
        proj_out_dim=256,
        crop_size=96,
        max_crops=6,
        overlap_margin=2,
        proj_inner_dim=384,
    ),
    region=RegionConfig(
        dim=256, coord_feat_dim=64, coord_out_dim=512, size_feat_dim=128, size_out_dim=512, inner_dim=256
    ),
    tokenizer=TokenizerConfig(
        templates=Templates(
            caption=CaptionTemplate(
                short=[TASK, CAPTION, INPUT, SHORT, ANSWER],
                normal=[TASK, CAPTION, INPUT, NORMAL, ANSWER],
                long=[TASK, CAPTION, INPUT, LONG, ANSWER],
            ),
            query=SpanTemplate([TASK, QUERY, INPUT], [ANSWER]),
            detect=SpanTemplate([TASK, DETECT, INPUT], [ANSWER]),
            point=SpanTemplate([TASK, POINT, INPUT], [ANSWER]),
        )
    ),
)


def build_tokenizer() -> Tokenizer:
    """The same on every run: the corpus is drawn from fixed seeds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(CONTROL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return tokenizer


def _corpus() -> Iterator[str]:
    for seed in range(4000):
        scene = make_scene(seed)
        rng = random.Random(seed)
        for _ in range(8):
            question = draw_question(rng, scene)
            if question.task != "caption" and not question.text.isupper():
                yield from _texts(question.text, scene)
            for text in (question.answer, *(mark.label for mark in question.marks)):
                yield from _texts(text, scene)
    yield from (text for text in (SEE, SEE_NONE, SEE_ALL, SO) for _ in range(100))
    yield from (" " + noun for noun in ABSENT for _ in range(3))


def _texts(text: str, scene: Scene) -> Iterator[str]:
    """The text without the printed one, as it begins and as it goes on after a space."""
    if text and scene.printed:
        text = text.replace(scene.printed.text, "\n")
    if text:
        yield text
        yield " " + text


def write(directory: Path) -> None:
    """Takes half a minute."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(CONFIG), indent=2))
    build_tokenizer().save(str(directory / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes config.json and tokenizer.json of the bundled model.")
    parser.add_argument("directory", type=Path)
    write(parser.parse_args().directory)


if __name__ == "__main__":
    main()
