"""From a checked request to the ids that follow the picture. All control ids come from the checkpoint's configuration.

    caption        template of the length
    query          prefix, spatial references, question, suffix, answer opener
    detect, point  prefix, " " + object, suffix

Without a picture BOS comes first. The answer opener of a query is its suffix once more, or the thinking id when the
model is to reason first: a habit of the reference that the weights have learned.
"""

from __future__ import annotations

import msgspec

from photon_backend.frontend.options import Request, invalid
from photon_backend.model.config import ModelConfig
from photon_backend.model.tokenizer import TextTokenizer

MAX_CHARS_PER_POSITION = 64  # of the context: longer texts are refused before the tokenizer spends time on them


class Prompt(msgspec.Struct, frozen=True):
    ids: list[int]
    coords: list[float]  # of the coord ids in `ids`, in order, 0..1
    sizes: list[tuple[float, float]]  # (width, height) of the size ids in `ids`, in order, 0..1


def build_prompt(request: Request, config: ModelConfig, tokenizer: TextTokenizer) -> Prompt:
    """Raises PhotonError INVALID_ARG: a task unknown to the checkpoint, or a prompt that the context cannot hold."""
    max_chars = MAX_CHARS_PER_POSITION * config.text.max_context
    if len(request.text) > max_chars:
        raise invalid(f"text_input has {len(request.text)} characters; at most {max_chars} are accepted")
    coords, sizes = _spatial_values(request.spatial_refs)
    ids = _prompt_ids(request, config, tokenizer)
    prefix_len = config.prefix_len if request.image is not None else 0
    room = config.text.max_context - prefix_len - 1  # the answer needs one
    if len(ids) > room:
        where = "room beside the image" if prefix_len else "room"
        raise invalid(
            f"text_input is too long: the prompt takes {len(ids)} tokens, there is {where} for {max(0, room)}"
        )
    return Prompt(ids, coords, sizes)


def _prompt_ids(request: Request, config: ModelConfig, tokenizer: TextTokenizer) -> list[int]:
    task, ids = request.task, config.tokenizer
    template = getattr(ids.templates, task)
    if template is None:
        raise invalid(f"task {task} is not known to this model")
    if task == "caption":
        caption = getattr(template, request.length)
        if caption is None:
            raise invalid(f"length {request.length} is not known to this model")
        return list(caption)
    if task != "query":
        return [*template.prefix, *tokenizer.encode(" " + request.text), *template.suffix]
    start = [] if request.image is not None else [ids.bos_id]
    refs = [id_ for ref in request.spatial_refs for id_ in [ids.coord_id] * 2 + [ids.size_id] * (len(ref) == 4)]
    opener = [ids.thinking_id] if request.reasoning else template.suffix
    return [*start, *template.prefix, *refs, *tokenizer.encode(request.text), *template.suffix, *opener]


def _spatial_values(refs: list[list[float]]) -> tuple[list[float], list[tuple[float, float]]]:
    """A point is its x and y; a box its centre, then its width and height."""
    coords: list[float] = []
    sizes: list[tuple[float, float]] = []
    for ref in refs:
        if len(ref) == 2:
            coords += ref
        else:
            x_min, y_min, x_max, y_max = ref
            coords += [(x_min + x_max) / 2, (y_min + y_max) / 2]
            sizes.append((x_max - x_min, y_max - y_min))
    return coords, sizes
