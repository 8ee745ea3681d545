"""Makes tests/model/golden/golden.npz and golden.json by running the public reference. Run by hand, never by a test:

    git clone https://github.com/vikhyat/moondream /tmp/moondream && git -C /tmp/moondream checkout 44146f1
    python -m tests.model.make_golden /tmp/moondream

The reference takes some constants of its released model for granted. They are replaced in its functions from here,
in memory, and nothing else of them: 729 patches, 378-pixel crops, 14-pixel patches, bfloat16 pixels, a tokenizer that
is downloaded by name. Weights, pictures and questions come from `tiny_checkpoint` and `cases`.

Token ids are read through the tokenizer: its `decode` is replaced by one that spells each id as one private character,
so the reference's answer text is its token list.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from photon_backend.model.config import VisionConfig
from tests.model.cases import MAX_TOKENS, Case, cases
from tests.model.tiny_checkpoint import (
    CONFIG,
    GOLDEN,
    PICTURES,
    TOKENIZER,
    config_for_reference,
    noise,
    picture,
    weights,
)

PRIVATE = 0x100000  # first character of a plane that no text uses
REAL_SIZES = [(21, 13), (378, 378), (379, 500), (600, 800), (1500, 700), (2000, 2100), (480, 2600)]


def main(reference: Path) -> None:
    sys.path.insert(0, str(reference))
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    model, recorder = _reference_model()
    arrays: dict[str, np.ndarray] = {}
    document: dict[str, Any] = {"crops": _crops(), "cases": {}}
    for name in PICTURES:
        arrays[f"vision/{name}"] = model._run_vision_encoder(Image.fromarray(picture(name))).numpy()
    for case in cases():
        recorder.clear()
        document["cases"][case.name] = _run(model, recorder, case)
        arrays[f"logits/{case.name}"] = recorder.first_logits
    np.savez_compressed(GOLDEN / "golden.npz", **arrays)
    (GOLDEN / "golden.json").write_text(_lines(document))
    _summary(document)


class Recorder:
    """What passes through the reference's first prefill, and how close its choices were."""

    def clear(self) -> None:
        self.prompt: list[int] = []
        self.first_logits = np.zeros(0, dtype=np.float32)
        self.margin = float("inf")  # smallest lead of a choice over the second best

    def watch(self, model: Any, module: Any) -> None:
        prefill, argmax = model._prefill_prompt, torch.argmax

        def recorded_prefill(prompt_tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = prefill(prompt_tokens, *args, **kwargs)
            if not self.prompt:
                self.prompt = prompt_tokens[0].tolist()
                self.first_logits = result[0][0].numpy().copy()
            return result

        def recorded_argmax(logits: torch.Tensor, dim: int) -> torch.Tensor:
            if logits.shape[-1] > 1:
                best = logits.reshape(-1, logits.shape[-1])[-1].topk(2).values
                self.margin = min(self.margin, float(best[0] - best[1]))
            return argmax(logits, dim=dim)

        model._prefill_prompt = recorded_prefill
        module.torch = _Torch(recorded_argmax)


class _Torch:
    """The torch module with another argmax, for the reference's generation loops only."""

    def __init__(self, argmax: Any) -> None:
        self.argmax = argmax

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _SpellingTokenizer:
    """Encodes as the real one; decodes each id to one private character."""

    def __init__(self) -> None:
        self.encode = Tokenizer.from_file(str(TOKENIZER)).encode

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(PRIVATE + token) for token in ids)


def _reference_model() -> tuple[Any, Recorder]:
    from moondream.torch import moondream, vision
    from moondream.torch.config import MoondreamConfig

    side, patch = CONFIG.vision.crop_size, CONFIG.vision.enc_patch_size
    _replace(moondream, vision.vision_projection, {"729": str(CONFIG.vision.num_patches)})
    geometry = f"overlap_margin=config.overlap_margin, base_size=({side}, {side}), patch_size={patch}"
    _replace(
        moondream,
        vision.prepare_crops,
        {"torch.bfloat16": "torch.float32", "overlap_margin=config.overlap_margin": geometry},
    )
    moondream.Tokenizer = type("Local", (), {"from_pretrained": staticmethod(lambda name: _SpellingTokenizer())})
    model = moondream.MoondreamModel(MoondreamConfig.from_dict(config_for_reference()), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights(), strict=False)
    assert not unexpected and all("kv_cache" in name for name in missing), (missing, unexpected)
    recorder = Recorder()
    recorder.watch(model, moondream)
    return model, recorder


def _replace(user: Any, function: Any, constants: dict[str, str]) -> None:
    """Defines `function` again in its own module with other constants, and hands it to the module that uses it."""
    source = inspect.getsource(function)
    for old, new in constants.items():
        assert old in source, (function, old)
        source = source.replace(old, new)
    exec(source, function.__globals__)
    setattr(user, function.__name__, function.__globals__[function.__name__])


def _crops() -> dict[str, Any]:
    """Checksums of the tiny pictures' crops and, at the released model's geometry, of pictures of several sizes."""
    from moondream.torch import image_crops

    assert not image_crops.HAS_VIPS, "the golden numbers are those of the Pillow path"
    result = {name: _crop_entry(image_crops, picture(name), CONFIG.vision) for name in PICTURES}
    for height, width in REAL_SIZES:
        name = f"{height}x{width}"
        result[name] = _crop_entry(image_crops, noise(height, width), VisionConfig())
    return result


def _crop_entry(image_crops: Any, image: np.ndarray, config: VisionConfig) -> dict[str, Any]:
    out = image_crops.overlap_crop_image(
        image,
        overlap_margin=config.overlap_margin,
        max_crops=config.max_crops,
        base_size=(config.crop_size, config.crop_size),
        patch_size=config.enc_patch_size,
    )
    crops = out["crops"]
    return {
        "tiling": list(out["tiling"]),
        "sha256": hashlib.sha256(crops.tobytes()).hexdigest(),
        "samples": crops[:, 40, 50, :].tolist(),  # one pixel of each crop, to see how far off a difference is
    }


def _run(model: Any, recorder: Recorder, case: Case) -> dict[str, Any]:
    image = Image.fromarray(picture(case.picture)) if case.picture else None
    settings = _settings(max_tokens=MAX_TOKENS, temperature=0)
    entry: dict[str, Any] = {}
    if case.task == "caption":
        entry["ids"] = _ids(model.caption(image, length=case.text, settings=settings)["caption"])
    elif case.task == "query":
        out = model.query(image, case.text, case.reasoning, list(case.refs) or None, settings=settings)
        entry["ids"] = _ids(out["answer"])
        if case.reasoning:
            entry["reasoning_ids"] = _ids(out["reasoning"]["text"])
            entry["grounding"] = out["reasoning"]["grounding"]
    else:
        settings = _settings(max_objects=case.max_objects)
        entry["objects"] = next(iter(getattr(model, case.task)(image, case.text, settings=settings).values()))
    entry["prompt"] = recorder.prompt
    entry["margin"] = round(recorder.margin, 5)
    return entry


def _settings(**settings: Any) -> dict[str, Any]:
    """The reference reads settings["variant"] without a default where an image is encoded."""
    return {**settings, "variant": None}


def _lines(document: dict[str, dict[str, Any]]) -> str:
    """JSON with one entry a line, so that a difference can be read."""
    sections = [
        f'"{section}": {{\n' + ",\n".join(f' "{name}": {json.dumps(entry)}' for name, entry in entries.items()) + "\n}"
        for section, entries in document.items()
    ]
    return "{\n" + ",\n".join(sections) + "\n}\n"


def _ids(text: str) -> list[int]:
    return [ord(character) - PRIVATE for character in text]


def _summary(document: dict[str, Any]) -> None:
    for name, entry in document["cases"].items():
        print(name, entry["margin"], entry.get("reasoning_ids", ""), entry.get("ids", entry.get("objects")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
