"""Checkpoints in and out, strictly: what does not fit is refused and named.

Two layouts are read: the present names, with or without a leading `model.`, and the older ones
(`text_model.`, `vision_encoder.`, `region_model.`), which are renamed; `._orig_mod` is dropped from either. Tensors go
from the file straight to the device and dtype; the modules are built on the meta device, so no weight exists twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from photon_backend.model.config import ModelConfig, load_config
from photon_backend.model.moondream import Moondream

EMBEDDING_STD = 0.02
FEATURE_STD = 4.0  # of the random Fourier frequencies, in periods over 0..1

_VISUAL = r"^vision_encoder\.encoder\.model\.visual\."
_OLD_NAMES = [  # (pattern, present name), applied in order; names that match none stay as they are
    (r"^text_model\.transformer\.h\.(\d+)\.mixer\.Wqkv\.", r"text.blocks.\1.attn.qkv."),
    (r"^text_model\.transformer\.h\.(\d+)\.mixer\.out_proj\.", r"text.blocks.\1.attn.proj."),
    (r"^text_model\.transformer\.h\.(\d+)\.(ln|mlp)\.", r"text.blocks.\1.\2."),
    (r"^text_model\.transformer\.embd\.wte\.weight$", r"text.wte"),
    (r"^text_model\.lm_head\.ln\.", r"text.post_ln."),
    (r"^text_model\.lm_head\.linear\.", r"text.lm_head."),
    (_VISUAL + r"patch_embed\.linear\.", r"vision.patch_emb."),
    (_VISUAL + r"pos_embed$", r"vision.pos_emb"),
    (_VISUAL + r"blocks\.(\d+)\.norm([12])\.", r"vision.blocks.\1.ln\2."),
    (_VISUAL + r"blocks\.(\d+)\.(attn|mlp)\.", r"vision.blocks.\1.\2."),
    (_VISUAL + r"norm\.", r"vision.post_ln."),
    (r"^vision_encoder\.projection\.mlp\.", r"vision.proj_mlp."),
    (r"^region_model\.coordinate_(encoder|decoder)\.", r"region.coord_\1."),
    (r"^region_model\.size_(encoder|decoder)\.", r"region.size_\1."),
]
_OLD_FEATURES = {  # stored transposed
    "region_model.coordinate_features.weight": "region.coord_features",
    "region_model.size_features.weight": "region.size_features",
}


class CheckpointError(ValueError):
    """A checkpoint that does not fit its config.json; the message names the tensors."""


def load_model(checkpoint: Path, device: torch.device | str, dtype: torch.dtype) -> Moondream:
    """Reads `config.json` and `model.safetensors` (or the shards of `model.safetensors.index.json`).

    The model is in eval mode and its parameters need no gradient. Raises FileNotFoundError or ValueError for
    config.json, CheckpointError for missing, extra, doubled or misshapen tensors and unreadable files.
    """
    checkpoint = Path(checkpoint)
    with torch.device("meta"):
        model = Moondream(load_config(checkpoint))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    loaded = {}
    with ExitStack() as stack:
        stored = _open_tensors(checkpoint, stack)
        _check(checkpoint, expected, stored)
        for name, tensor in stored.items():
            loaded[name] = tensor.read(device, dtype)
    model.load_state_dict(loaded, strict=True, assign=True)
    return model.eval().requires_grad_(False)


def random_model(config: ModelConfig, device: torch.device | str, dtype: torch.dtype, seed: int) -> Moondream:
    """A trainable model of that shape with random weights; a seed gives the same weights on one kind of device."""
    with torch.device("meta"):
        model = Moondream(config)
    model = model.to(dtype).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            _initialise(module, generator)
        for table in (model.text.wte, model.vision.pos_emb):
            table.normal_(0.0, EMBEDDING_STD, generator=generator)
        for frequencies in (model.region.coord_features, model.region.size_features):
            frequencies.normal_(0.0, FEATURE_STD, generator=generator)
    return model


def save_checkpoint(model: Moondream, directory: Path) -> None:
    """Writes config.json and model.safetensors (present names with `model.`); the directory is made if need be."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_bytes(msgspec.json.format(msgspec.json.encode(model.config), indent=2))
    tensors = {f"model.{name}": tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, directory / "model.safetensors")


def _initialise(module: nn.Module, generator: torch.Generator) -> None:
    if isinstance(module, nn.Linear):
        module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
        module.bias.zero_()
    elif isinstance(module, nn.LayerNorm):
        module.weight.fill_(1.0)
        module.bias.zero_()


class _Stored:
    """One tensor in an open file, not read yet."""

    def __init__(self, file: safe_open, key: str) -> None:
        self.file, self.key = file, key
        self.transposed = _clean(key) in _OLD_FEATURES

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.file.get_slice(self.key).get_shape())
        return shape[::-1] if self.transposed else shape

    @property
    def dtype(self) -> str:
        return str(self.file.get_slice(self.key).get_dtype())

    def read(self, device: torch.device | str, dtype: torch.dtype) -> Tensor:
        """Copied always: the file's tensors lie in mapped memory, and whoever rewrites it would change or kill us."""
        tensor = self.file.get_tensor(self.key)
        return (tensor.T if self.transposed else tensor).to(device=device, dtype=dtype, copy=True).contiguous()


def _open_tensors(checkpoint: Path, stack: ExitStack) -> dict[str, _Stored]:
    """Every tensor of the checkpoint under its present name."""
    stored: dict[str, _Stored] = {}
    for path in _files(checkpoint):
        try:
            file = stack.enter_context(safe_open(path, framework="pt"))
        except (FileNotFoundError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        for key in file.keys():  # noqa: SIM118 - not a dict
            name = _present_name(key)
            if name in stored:
                raise CheckpointError(f"{checkpoint}: tensor {name} is stored twice, as {stored[name].key} and {key}")
            stored[name] = _Stored(file, key)
    return stored


def _files(checkpoint: Path) -> list[Path]:
    single, index = checkpoint / "model.safetensors", checkpoint / "model.safetensors.index.json"
    if single.exists():
        return [single]
    if not index.exists():
        raise CheckpointError(f"{checkpoint}: neither {single.name} nor {index.name}")
    try:
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index}: no weight_map of tensor names to files") from error
    return [checkpoint / shard for shard in sorted(shards)]


def _clean(key: str) -> str:
    return key.replace("._orig_mod", "").removeprefix("model.")


def _present_name(key: str) -> str:
    name = _clean(key)
    if name in _OLD_FEATURES:
        return _OLD_FEATURES[name]
    for pattern, replacement in _OLD_NAMES:
        renamed, found = re.subn(pattern, replacement, name)
        if found:
            return renamed
    return name


def _check(checkpoint: Path, expected: dict[str, tuple[int, ...]], stored: dict[str, _Stored]) -> None:
    problems = list(_problems(expected, stored))
    if problems:
        raise CheckpointError(f"{checkpoint}: " + "; ".join(problems))


def _problems(expected: dict[str, tuple[int, ...]], stored: dict[str, _Stored]) -> Iterator[str]:
    missing = [name for name in expected if name not in stored]
    extra = [tensor.key for name, tensor in stored.items() if name not in expected]
    if missing:
        yield "missing tensors " + ", ".join(missing)
    if extra:
        yield "extra tensors " + ", ".join(extra)
    for name, shape in expected.items():
        tensor = stored.get(name)
        if tensor and tensor.shape != shape:
            yield f"tensor {tensor.key} has shape {list(tensor.shape)} instead of {list(shape)}"
        elif tensor and tensor.dtype not in ("F32", "F16", "BF16", "F64"):
            yield f"tensor {tensor.key} has dtype {tensor.dtype}, not a floating-point one"
