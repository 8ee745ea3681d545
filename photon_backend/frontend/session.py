"""One request at a front end: what to send to the engine, and what its events become for the client.

A `Session` is fed by one thread, its owner. Only `picture` may run in another one. If that fails, the owner answers
with the error and cancels at the engine; the session hears nothing more.

A stop string is seen here, not by the engine: the session ends at once with reason "stop", asks for a Cancel
(`cancel_wanted`) and ignores what still comes.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from photon_backend.config import Settings
from photon_backend.frontend.detokenizer import Detokenizer, StopFilter
from photon_backend.frontend.images import EncodedImage, decode_image, read_image
from photon_backend.frontend.options import RawRequest, Request, parse_request
from photon_backend.frontend.prompts import build_prompt
from photon_backend.grammar.matcher import validate
from photon_backend.model.config import ModelConfig, TokenizerConfig, load_config
from photon_backend.model.crops import make_crops
from photon_backend.model.tokenizer import TextTokenizer
from photon_backend.protocol import Done, Failed, FinishReason, GrammarSpec, PhotonError, Submit, Tokens, Usage

GOOD_GRAMMARS = 256  # remembered

__all__ = ["FrontEnd", "RawRequest", "Response", "Session", "check_grammar"]


class Response(msgspec.Struct, frozen=True, eq=False):
    """What goes to the client in one piece. With an error everything else is None.

    text: a delta when streaming, otherwise all of it. For detect and point it is JSON: the whole result, or when
    streaming one line for each object that `objects` or `points` brings.
    """

    text: str | None = None
    objects: np.ndarray | None = None  # float32 [n, 4]: x_min, y_min, x_max, y_max in 0..1
    points: np.ndarray | None = None  # float32 [n, 2]: x, y in 0..1
    finish_reason: FinishReason | None = None  # on the last response
    usage: str | None = None  # on the last response: JSON
    error: PhotonError | None = None
    final: bool = False


class FrontEnd:
    """What the sessions of a process share. Raises what `load_config` and `TextTokenizer` raise."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.config: ModelConfig = load_config(Path(settings.checkpoint))
        self.tokenizer = TextTokenizer(Path(settings.checkpoint) / "tokenizer.json")
        self._good: OrderedDict[GrammarSpec, None] = OrderedDict()  # grammars that need not be looked at again
        Image.init()  # loads the picture formats now and not within the first request: 0.1 s

    def open(self, raw: RawRequest, request_id: str) -> Session:
        """Checks a request, its picture's header included, but not its grammar: see `check_grammar`.

        Raises PhotonError; then nothing needs to be undone.
        """
        start = time.perf_counter()
        request = parse_request(raw, default_seed=secrets.randbelow(2**63))
        image = read_image(request.image, self.settings) if request.image is not None else None
        prompt = build_prompt(request, self.config, self.tokenizer)
        max_tokens = min(request.sampling.max_tokens, self.config.text.max_context)
        submit = Submit(
            request_id=request_id,
            task=request.task,
            prompt_ids=prompt.ids,
            digest=image.digest if image else None,
            coords=prompt.coords,
            sizes=prompt.sizes,
            reasoning=request.reasoning,
            max_objects=request.max_objects,
            max_time_ms=request.max_time_ms,
            sampling=msgspec.structs.replace(request.sampling, max_tokens=max_tokens),
            grammar=request.grammar,
            name=raw.name,
        )
        return Session(self, request, submit, image, preprocess_ms=(time.perf_counter() - start) * 1e3)

    def is_good(self, grammar: GrammarSpec) -> bool:
        """Whether it was found good before, and not forgotten since."""
        if grammar in self._good:
            self._good.move_to_end(grammar)
        return grammar in self._good

    def good(self, grammar: GrammarSpec) -> None:
        """It was checked and need not be looked at again."""
        self._good[grammar] = None
        if len(self._good) > GOOD_GRAMMARS:
            self._good.popitem(last=False)


def check_grammar(grammar: GrammarSpec) -> float:
    """Milliseconds that it took: up to a second for one of 64 KiB. In any thread. Raises PhotonError."""
    start = time.perf_counter()
    validate(grammar)
    return (time.perf_counter() - start) * 1e3


class Session:
    """submit: to send to the engine. finished: the final response was given. cancel_wanted: send a Cancel, once.
    preprocess_ms: work on the request so far."""

    def __init__(
        self, front_end: FrontEnd, request: Request, submit: Submit, image: EncodedImage | None, preprocess_ms: float
    ) -> None:
        self.submit = submit
        self.cancel_wanted = False
        self.finished = False
        self._config = front_end.config
        self._stream = request.stream
        self._image = image
        self._picture_asked = False
        self.preprocess_ms = preprocess_ms
        self._opened = time.perf_counter()
        self._first_token: float | None = None
        self._answer: _Text | _Spatial
        if request.task in ("detect", "point"):
            self._answer = _Spatial(is_box=request.task == "detect", as_lines=request.stream)
        else:
            self._answer = _Text(front_end.tokenizer, request, front_end.config.tokenizer)

    def picture(self) -> tuple[tuple[int, int], np.ndarray]:
        """(rows, columns) of tiles and crops uint8 [C, side, side, 3], as `make_crops` gives them. Slow: decodes.

        May run in any thread. Raises PhotonError INVALID_ARG for damaged pictures.
        """
        image = self._image
        if image is None:
            raise PhotonError("INTERNAL", "the picture of a request that has none or has ended was asked for")
        self._picture_asked = True
        start = time.perf_counter()
        pixels, tiling = make_crops(decode_image(image.data), self._config.vision)
        self.preprocess_ms += (time.perf_counter() - start) * 1e3
        return tiling, pixels

    def feed(self, events: Sequence[Tokens | Done | Failed]) -> list[Response]:
        """At most one response, with all that the events bring together; [] while there is nothing to say."""
        for event in events:
            if self.finished:
                return []
            match event:
                case Tokens():
                    self._image = None  # the engine holds the prefix now and does not ask again
                    self._first_token = self._first_token or time.perf_counter()
                    if self._answer.add(event.ids, event.values):
                        self.cancel_wanted = True
                        return [self._final("stop", self._usage_at_stop())]
                case Done():
                    return [self._final(event.reason, event.usage)]
                case Failed():
                    self._end()
                    return [Response(error=PhotonError(event.code, event.message), final=True)]
        if self._stream and self._answer.has_news:
            return [Response(**self._answer.take())]
        return []

    def _final(self, reason: FinishReason, usage: Usage) -> Response:
        self._answer.close()
        self._end()
        return Response(**self._answer.take(), finish_reason=reason, usage=self._usage_json(usage), final=True)

    def _end(self) -> None:
        self.finished = True
        self._image = None

    def _usage_at_stop(self) -> Usage:
        """The engine's account is not here yet when a stop string ends the request, so it is the front end's own:
        times from the opening of the session, `queue_ms` unknown (0)."""
        now, first = time.perf_counter(), self._first_token or self._opened
        prefix = self._config.prefix_len if self.submit.digest is not None else 0
        return Usage(
            input_tokens=prefix + len(self.submit.prompt_ids),
            cached_tokens=0 if self._picture_asked else prefix,
            output_tokens=self._answer.num_tokens,
            ttft_ms=(first - self._opened) * 1e3,
            decode_ms=(now - first) * 1e3,
        )

    def _usage_json(self, usage: Usage) -> str:
        document: dict[str, Any] = {
            "request_id": self.submit.name or self.submit.request_id,
            "input_tokens": usage.input_tokens,
            "cached_tokens": usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "queue_ms": round(usage.queue_ms, 3),
            "preprocess_ms": round(self.preprocess_ms, 3),
            "ttft_ms": round(usage.ttft_ms, 3),
            "decode_ms": round(usage.decode_ms, 3),
        }
        if isinstance(self._answer, _Text) and self._answer.reasoning is not None:
            document["reasoning"] = self._answer.reasoning.result()
        return msgspec.json.encode(document).decode()


class _Text:
    """The answer of query and caption: text that is certain and was not taken yet."""

    def __init__(self, tokenizer: TextTokenizer, request: Request, ids: TokenizerConfig) -> None:
        self.num_tokens = 0
        self.reasoning = _Reasoning(tokenizer, ids) if request.reasoning else None
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopFilter(request.stop)
        self._stopped = False
        self._news: list[str] = []

    @property
    def has_news(self) -> bool:
        return any(self._news)

    def add(self, ids: list[int], values: list[float]) -> bool:
        """True when a stop string was completed; what follows it is not looked at."""
        coords = iter(values)
        for token_id in ids:
            self.num_tokens += 1
            if self.reasoning is not None and not self.reasoning.ended:
                self.reasoning.add(token_id, coords)
                continue
            text, self._stopped = self._stops.feed(self._detokenizer.feed(token_id))
            self._news.append(text)
            if self._stopped:
                return True
        return False

    def close(self) -> None:
        """No more ids come: gives up what was held back."""
        if not self._stopped:
            text, self._stopped = self._stops.feed(self._detokenizer.flush())
            self._news += [text] if self._stopped else [text, self._stops.flush()]

    def take(self) -> dict[str, Any]:
        text, self._news = "".join(self._news), []
        return {"text": text}


class _Reasoning:
    """Ids up to the answer id, in chunks that start at every grounding mark; coord ids bring the chunk's points."""

    def __init__(self, tokenizer: TextTokenizer, ids: TokenizerConfig) -> None:
        self.ended = False
        self._tokenizer = tokenizer
        self._ids = ids
        self._chunks: list[tuple[list[int], list[float]]] = [([], [])]

    def add(self, token_id: int, coords: Any) -> None:
        """coords: iterator over the values that belong to the coord ids, in order."""
        if token_id == self._ids.answer_id:
            self.ended = True
            return
        if token_id in (self._ids.start_ground_points_id, self._ids.end_ground_id):
            self._chunks.append(([], []))
        chunk_ids, chunk_coords = self._chunks[-1]
        chunk_ids.append(token_id)
        if token_id == self._ids.coord_id:
            chunk_coords.append(next(coords))

    def result(self) -> dict[str, Any]:
        """{"text", "grounding": [{"start_idx", "end_idx", "points": [[x, y], ...]}]}, as the reference lays it out:
        indices are characters of the text, an odd last coordinate is dropped."""
        text, grounding = "", []
        for ids, coords in self._chunks:
            chunk = self._tokenizer.decode(ids)
            points = [[x, y] for x, y in zip(coords[0::2], coords[1::2], strict=False)]
            if points:
                grounding.append({"start_idx": len(text), "end_idx": len(text) + len(chunk), "points": points})
            text += chunk
        return {"text": text, "grounding": grounding}


class _Spatial:
    """The objects of detect (x, y, width, height each) or point (x, y): complete ones that were not taken yet."""

    def __init__(self, is_box: bool, as_lines: bool) -> None:
        self.num_tokens = 0
        self._name = "objects" if is_box else "points"
        self._keys = ("x_min", "y_min", "x_max", "y_max") if is_box else ("x", "y")
        self._as_lines = as_lines
        self._values: list[float] = []

    @property
    def has_news(self) -> bool:
        return len(self._values) >= len(self._keys)

    def add(self, ids: list[int], values: list[float]) -> bool:
        self.num_tokens += len(ids)
        self._values.extend(values)
        return False

    def close(self) -> None:
        """Nothing is held back; an object that is not complete is dropped."""

    def take(self) -> dict[str, Any]:
        width = len(self._keys)
        complete = len(self._values) // width * width
        found = np.asarray(self._values[:complete], dtype=np.float32).reshape(-1, width)
        self._values = self._values[complete:]
        if width == 4:
            found = _corners(found)
        documents = [dict(zip(self._keys, map(_shortest, row), strict=True)) for row in found]
        if self._as_lines:
            text = b"".join(msgspec.json.encode(document) + b"\n" for document in documents)
        else:
            text = msgspec.json.encode({self._name: documents})
        return {self._name: found, "text": text.decode()}


def _corners(boxes: np.ndarray) -> np.ndarray:
    """float32 [n, 4] (x, y of the centre, width, height) to the corners, cut at the picture's borders."""
    centre, half = boxes[:, :2], boxes[:, 2:] / np.float32(2)
    return np.clip(np.concatenate([centre - half, centre + half], axis=1), 0.0, 1.0)


def _shortest(value: np.float32) -> float:
    """The shortest decimal that is this float32: 0.1, not 0.10000000149011612."""
    return float(str(value))
