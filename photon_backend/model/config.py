"""Sizes and token ids of a checkpoint, read from its `config.json`. Nothing here is assumed by other code.

The keys are those of the public reference (`vikhyat/moondream`). Two of its habits are not copied: the grid side is
crop_size / enc_patch_size here, not `enc_n_layers`, and the bin counts come from `coord_out_dim` and `size_out_dim`.

Shape letters, the same in every module:

    B  rows of a batch            T  packed tokens of a step        V  vocabulary
    D  text width                 H  query heads                    K  key/value heads
    E  head width                 L  layers                         C  crops
    N  patches of a crop, also the embeddings of a picture          G  grid side, N = G * G
    W  vision width               P  pages of the pool              S  positions in a page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec


class TextConfig(msgspec.Struct, frozen=True):
    dim: int = 2048
    ff_dim: int = 8192
    n_layers: int = 24
    vocab_size: int = 51200
    max_context: int = 2048
    n_heads: int = 32
    n_kv_heads: int = 32
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.n_heads

    @property
    def rot_dim(self) -> int:
        """Dimensions of a head that rope rotates: the first half."""
        return self.head_dim // 2


class VisionConfig(msgspec.Struct, frozen=True):
    enc_dim: int = 1152
    enc_patch_size: int = 14
    enc_n_layers: int = 27
    enc_ff_dim: int = 4304
    enc_n_heads: int = 16
    proj_out_dim: int = 2048
    crop_size: int = 378
    in_channels: int = 3
    max_crops: int = 12  # tiles at most; the global crop comes on top
    overlap_margin: int = 4  # patches
    proj_inner_dim: int = 8192

    @property
    def grid(self) -> int:
        """Patches along one side of a crop (G)."""
        return self.crop_size // self.enc_patch_size

    @property
    def num_patches(self) -> int:
        """Patches of a crop, and embeddings of a picture (N)."""
        return self.grid * self.grid


class RegionConfig(msgspec.Struct, frozen=True):
    dim: int = 2048
    coord_feat_dim: int = 256
    coord_out_dim: int = 1024  # bins of a coordinate
    size_feat_dim: int = 512
    size_out_dim: int = 2048  # bins of width, then bins of height
    inner_dim: int = 8192

    @property
    def size_bins(self) -> int:
        return self.size_out_dim // 2


class SpanTemplate(msgspec.Struct, frozen=True):
    prefix: list[int]
    suffix: list[int]


class CaptionTemplate(msgspec.Struct, frozen=True):
    """None: the checkpoint does not know that length (Moondream 2's own config has no `long`)."""

    short: list[int] | None = None
    normal: list[int] | None = None
    long: list[int] | None = None


class Templates(msgspec.Struct, frozen=True):
    """None: the checkpoint does not know that task."""

    caption: CaptionTemplate | None = CaptionTemplate(
        [1, 32708, 2, 12492, 3], [1, 32708, 2, 6382, 3], [1, 32708, 2, 4059, 3]
    )
    query: SpanTemplate | None = SpanTemplate([1, 15381, 2], [3])
    detect: SpanTemplate | None = SpanTemplate([1, 7235, 476, 2], [3])
    point: SpanTemplate | None = SpanTemplate([1, 2581, 2], [3])


class TokenizerConfig(msgspec.Struct, frozen=True):
    bos_id: int = 0
    eos_id: int = 0
    answer_id: int = 3
    thinking_id: int = 4
    coord_id: int = 5
    size_id: int = 6
    start_ground_points_id: int = 7
    end_ground_id: int = 9
    templates: Templates = Templates()

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids that stand for no text: eos ends an answer, the others are the model's own structure."""
        marks = (self.start_ground_points_id, self.end_ground_id)
        return frozenset(
            (self.bos_id, self.eos_id, self.answer_id, self.thinking_id, self.coord_id, self.size_id, *marks)
        )


class ModelConfig(msgspec.Struct, frozen=True):
    text: TextConfig = TextConfig()
    vision: VisionConfig = VisionConfig()
    region: RegionConfig = RegionConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()

    @property
    def prefix_len(self) -> int:
        """Positions of an image prefix: BOS and one embedding per patch."""
        return 1 + self.vision.num_patches


def load_config(checkpoint: Path) -> ModelConfig:
    """Reads `config.json` of a checkpoint directory.

    Raises FileNotFoundError, or ValueError with the offending key when it is not a configuration of this family.
    """
    path = Path(checkpoint) / "config.json"
    try:
        config = msgspec.json.decode(path.read_bytes(), type=ModelConfig)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path}: {error}") from error
    for problem in _problems(config):
        raise ValueError(f"{path}: {problem}")
    return config


def _problems(config: ModelConfig) -> Iterator[str]:
    """What in the sizes cannot be built, or would only fail with the first picture."""
    text, vision, region = config.text, config.vision, config.region
    if text.dim % text.n_heads or text.head_dim % 4:
        yield f"text.dim {text.dim} must be n_heads {text.n_heads} times a multiple of 4"
    if text.n_heads % text.n_kv_heads:
        yield f"text.n_heads {text.n_heads} must be a multiple of n_kv_heads {text.n_kv_heads}"
    if vision.enc_dim % vision.enc_n_heads:
        yield f"vision.enc_dim {vision.enc_dim} must be a multiple of enc_n_heads {vision.enc_n_heads}"
    if vision.crop_size % vision.enc_patch_size:
        yield f"vision.crop_size {vision.crop_size} must be a multiple of enc_patch_size {vision.enc_patch_size}"
    if not 0 <= 2 * vision.overlap_margin < vision.grid:
        yield f"vision.overlap_margin {vision.overlap_margin} leaves nothing of a crop of {vision.grid} patches"
    if vision.max_crops < 1:
        yield f"vision.max_crops {vision.max_crops} must be 1 at least"
    if not text.dim == vision.proj_out_dim == region.dim:
        widths = f"text.dim {text.dim}, vision.proj_out_dim {vision.proj_out_dim}, region.dim {region.dim}"
        yield f"{widths} must be equal"
    for name, size in (
        ("coord_feat_dim", region.coord_feat_dim),
        ("size_feat_dim", region.size_feat_dim),
        ("size_out_dim", region.size_out_dim),
    ):
        if size % 2:
            yield f"region.{name} {size} must be even"
    if config.prefix_len >= text.max_context:
        yield f"text.max_context {text.max_context} has no room beside a picture's {config.prefix_len} positions"
