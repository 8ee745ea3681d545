"""The whole model: text, vision and region parts. Parameter names are those of a checkpoint without `model.`."""

from __future__ import annotations

from torch import nn

from photon_backend.model.config import ModelConfig
from photon_backend.model.region import Region
from photon_backend.model.text import Text
from photon_backend.model.vision import Vision


class Moondream(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.text = Text(config.text)
        self.vision = Vision(config.vision)
        self.region = Region(config.region)
