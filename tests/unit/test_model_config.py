"""config.json: defaults are Moondream 2, and sizes that cannot work are refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from photon_backend.model.config import ModelConfig, load_config


def write(directory: Path, document: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def test_defaults_are_moondream_2(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, {"text": {"prefix_attn": 730, "group_size": None}}))
    assert config == ModelConfig()
    assert (config.prefix_len, config.text.head_dim, config.text.rot_dim, config.vision.grid) == (730, 64, 32, 27)
    assert config.region.size_bins == 1024


@pytest.mark.parametrize(
    ("section", "values", "named"),
    [
        ("text", {"n_heads": 30}, "text.dim"),
        ("text", {"n_kv_heads": 5}, "n_kv_heads"),
        ("text", {"dim": 1024}, "region.dim"),
        ("text", {"max_context": 730}, "text.max_context"),
        ("vision", {"enc_n_heads": 7}, "enc_n_heads"),
        ("vision", {"crop_size": 380}, "vision.crop_size"),
        ("vision", {"overlap_margin": 14}, "vision.overlap_margin"),
        ("vision", {"max_crops": 0}, "vision.max_crops"),
        ("vision", {"proj_out_dim": 1024}, "vision.proj_out_dim"),
        ("region", {"size_out_dim": 2047}, "region.size_out_dim"),
        ("text", {"dim": "wide"}, "text.dim"),
    ],
)
def test_impossible_sizes_are_named(tmp_path: Path, section: str, values: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as failure:
        load_config(write(tmp_path, {section: values}))
    assert "config.json" in str(failure.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_config(tmp_path)
