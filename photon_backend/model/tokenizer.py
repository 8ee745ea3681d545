"""Text to ids and back, from a checkpoint's `tokenizer.json`. Torch-free, safe to call from several threads.

What a user types must never become a control token: an eos, coordinate or answer id inside a question would let its
author write the model's own structure. So encoding runs on a copy of the tokenizer from which every added token,
special or not, has been taken out; the text "<|endoftext|>" is then spelled with ordinary pieces like any other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TextTokenizer:
    """path_to_tokenizer_json: a file of the `tokenizers` library. Raises FileNotFoundError, or ValueError naming it."""

    def __init__(self, path_to_tokenizer_json: Path | str) -> None:
        text = Path(path_to_tokenizer_json).read_text(encoding="utf-8")
        try:
            self._decoder = Tokenizer.from_str(text)
            self._encoder = Tokenizer.from_str(json.dumps(_without_added_tokens(json.loads(text))))
        except Exception as error:  # the library raises plain Exception for a file it cannot read
            raise ValueError(f"{path_to_tokenizer_json}: not a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        """Ids of the text alone, no bos. Never an added or special id, whatever the text spells."""
        return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of the ids; special ids are left out, bytes that are no UTF-8 become U+FFFD."""
        return self._decoder.decode(list(ids))


def _without_added_tokens(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer without its added tokens, truncation and padding.

    They are removed from the model's vocabulary too, with the merges that build them: a trained BPE lists its special
    tokens there, and a merge or a whole-word look-up could still produce one.
    """
    names = {token["content"] for token in spec.get("added_tokens") or []}
    spec = {**spec, "added_tokens": [], "truncation": None, "padding": None, "post_processor": None}
    model = dict(spec["model"])
    if isinstance(model.get("vocab"), dict):
        model["vocab"] = {piece: index for piece, index in model["vocab"].items() if piece not in names}
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names & {pair[0], pair[1], pair[0] + pair[1]}]
    spec["model"] = model
    return spec
