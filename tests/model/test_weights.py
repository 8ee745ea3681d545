"""Both checkpoint layouts, shards, and every way in which a checkpoint can fail to fit."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from photon_backend.model.moondream import Moondream
from photon_backend.model.weights import CheckpointError, load_model, random_model, save_checkpoint
from tests.model.tiny_checkpoint import CONFIG, weights, write_checkpoint

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path)
    return tmp_path


def load(checkpoint: Path, tensors: Tensors) -> Moondream:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, checkpoint / "model.safetensors")
    return load_model(checkpoint, "cpu", torch.float32)


def assert_same(model: Moondream, expected: Tensors) -> None:
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def old_layout(tensors: Tensors) -> Tensors:
    """Under the older names, spelled out here independently of the reader's table."""
    return {old_name(name): tensor.T if name.endswith("_features") else tensor for name, tensor in tensors.items()}


def old_name(name: str) -> str:
    plain = {
        "text.wte": "text_model.transformer.embd.wte.weight",
        "vision.pos_emb": "vision_encoder.encoder.model.visual.pos_embed",
        "region.coord_features": "region_model.coordinate_features.weight",
        "region.size_features": "region_model.size_features.weight",
    }
    if name in plain:
        return plain[name]
    module, _, leaf = name.rpartition(".")
    part, _, rest = module.partition(".")
    return {"text": old_text, "vision": old_vision, "region": old_region}[part](rest) + "." + leaf


def old_text(rest: str) -> str:
    if rest in ("post_ln", "lm_head"):
        return "text_model.lm_head." + {"post_ln": "ln", "lm_head": "linear"}[rest]
    _, layer, inner = rest.split(".", 2)
    inner = {"attn.qkv": "mixer.Wqkv", "attn.proj": "mixer.out_proj"}.get(inner, inner)
    return f"text_model.transformer.h.{layer}.{inner}"


def old_vision(rest: str) -> str:
    if rest.startswith("proj_mlp"):
        return "vision_encoder.projection.mlp." + rest.removeprefix("proj_mlp.")
    rest = {"patch_emb": "patch_embed.linear", "post_ln": "norm"}.get(rest, rest)
    return "vision_encoder.encoder.model.visual." + rest.replace("ln1", "norm1").replace("ln2", "norm2")


def old_region(rest: str) -> str:
    return "region_model." + rest.replace("coord_", "coordinate_")


def test_names_with_and_without_model_prefix(checkpoint: Path) -> None:
    expected = weights()
    assert_same(load_model(checkpoint, "cpu", torch.float32), expected)
    assert_same(load(checkpoint, expected), expected)


def test_old_names(checkpoint: Path) -> None:
    assert_same(load(checkpoint, old_layout(weights())), weights())


def test_old_names_with_compilation_infix(checkpoint: Path) -> None:
    stored = {
        name.replace("transformer.h.1.", "transformer.h.1._orig_mod.").replace(
            "model.visual", "model._orig_mod.visual"
        ): t
        for name, t in old_layout(weights()).items()
    }
    assert any("_orig_mod" in name for name in stored)
    assert_same(load(checkpoint, stored), weights())


@pytest.mark.parametrize("layout", [dict, old_layout])
def test_shards(checkpoint: Path, layout: Callable[[Tensors], Tensors]) -> None:
    write_shards(checkpoint, layout(weights()))
    assert_same(load_model(checkpoint, "cpu", torch.float32), weights())


def write_shards(checkpoint: Path, tensors: Tensors) -> None:
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name].contiguous() for name in held}, checkpoint / file)
    index = {"metadata": {}, "weight_map": {name: file for file, held in parts.items() for name in held}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))


def test_missing_shard_is_named(checkpoint: Path) -> None:
    write_shards(checkpoint, weights())
    (checkpoint / "model-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors"):
        load_model(checkpoint, "cpu", torch.float32)


@pytest.mark.parametrize("index", ["[]", "{}", "no json", '{"weight_map": []}'])
def test_useless_index(checkpoint: Path, index: str) -> None:
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match="weight_map"):
        load_model(checkpoint, "cpu", torch.float32)


def test_no_tensors_at_all(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        load_model(checkpoint, "cpu", torch.float32)


def test_broken_file(checkpoint: Path) -> None:
    data = (checkpoint / "model.safetensors").read_bytes()
    (checkpoint / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load_model(checkpoint, "cpu", torch.float32)


def test_every_missing_tensor_is_named(checkpoint: Path) -> None:
    tensors = weights()
    del tensors["text.blocks.2.attn.qkv.bias"], tensors["vision.pos_emb"]
    with pytest.raises(CheckpointError) as failure:
        load(checkpoint, tensors)
    assert "missing" in str(failure.value)
    assert "text.blocks.2.attn.qkv.bias" in str(failure.value) and "vision.pos_emb" in str(failure.value)


@pytest.mark.parametrize("extra", ["text.blocks.3.ln.bias", "text_model.transformer.h.0.mixer.rotary", "optimizer"])
def test_extra_tensor_is_named(checkpoint: Path, extra: str) -> None:
    with pytest.raises(CheckpointError, match=f"extra tensors {re.escape(extra)}"):
        load(checkpoint, {**weights(), extra: torch.zeros(1)})


@pytest.mark.parametrize("name", ["text.wte", "region.size_features", "vision.blocks.5.mlp.fc1.weight"])
@pytest.mark.parametrize("layout", [dict, old_layout])
def test_misshapen_tensor_is_named(checkpoint: Path, name: str, layout: Callable[[Tensors], Tensors]) -> None:
    tensors = weights()
    right = list(tensors[name].shape)
    tensors[name] = torch.cat([tensors[name], tensors[name][:1]])
    with pytest.raises(CheckpointError) as failure:
        load(checkpoint, layout(tensors))
    stored = name if layout is dict else old_name(name)
    assert f"tensor {stored} has shape {[right[0] + 1, *right[1:]]} instead of {right}" in str(failure.value)


def test_tensor_stored_twice(checkpoint: Path) -> None:
    tensors = weights()
    tensors["model.text.wte"] = tensors["text.wte"].clone()
    with pytest.raises(CheckpointError, match=r"text\.wte is stored twice"):
        load(checkpoint, tensors)


def test_integer_tensor_is_refused(checkpoint: Path) -> None:
    tensors = weights()
    tensors["text.wte"] = tensors["text.wte"].to(torch.int8)
    with pytest.raises(CheckpointError, match=r"text\.wte has dtype I8"):
        load(checkpoint, tensors)


def test_loaded_model_is_frozen_and_has_the_asked_dtype(checkpoint: Path) -> None:
    model = load_model(checkpoint, "cpu", torch.bfloat16)
    assert not model.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert torch.equal(model.text.wte, weights()["text.wte"].bfloat16())


def test_a_loaded_model_does_not_depend_on_its_file(checkpoint: Path) -> None:
    model = load_model(checkpoint, "cpu", torch.float32)
    with (checkpoint / "model.safetensors").open("r+b") as file:  # in place, as a copy over it would
        file.write(bytes((checkpoint / "model.safetensors").stat().st_size))
    assert_same(model, weights())


def test_saved_checkpoint_loads_again(tmp_path: Path) -> None:
    model = random_model(CONFIG, "cpu", torch.float32, seed=3)
    save_checkpoint(model, tmp_path / "new")
    assert all(name.startswith("model.") for name in load_file(tmp_path / "new" / "model.safetensors"))
    again = load_model(tmp_path / "new", "cpu", torch.float32)
    assert again.config == CONFIG
    assert_same(again, model.state_dict())


def test_random_model_depends_on_the_seed_only() -> None:
    first, same, other = (random_model(CONFIG, "cpu", torch.float32, seed) for seed in (1, 1, 2))
    assert_same(first, same.state_dict())
    assert not torch.equal(first.text.wte, other.text.wte)
    assert all(torch.isfinite(tensor).all() for tensor in first.state_dict().values())
