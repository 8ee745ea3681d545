"""Traffic for the load test and the soak: greedy requests of every task over many pictures, through asyncio clients.

Doors: `grpc` (ModelStreamInfer on photon, one stream a request), `generate` (HTTP, one answer) and `generate_stream`
(HTTP, server-sent events). Every answer can be compared with the one that the same request got alone.
"""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import numpy as np
from photon_client import AsyncClient, PhotonError
from photon_client.errors import from_text
from PIL import Image

from photon_backend.protocol import TASKS
from photon_backend.tiny.scenes import make_scene

DOORS = ("grpc", "generate", "generate_stream")
TOLERANCE = 1e-6  # of a coordinate: JSON and tensors write the same float32 differently
QUANTILES = (50, 90, 99)
LINE_BYTES = 1 << 20  # of one server-sent event
Parts = AsyncGenerator[tuple[list[Any], dict[str, Any] | None], None]  # new content; None, or the end


@dataclass(frozen=True)
class Ask:
    """One greedy request. `options` go into sampling_parameters."""

    task: str
    picture: int
    text: str | None
    options: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    content: str | list[list[float]]  # text, or rows of coordinates
    finish_reason: str
    tokens: int

    def same(self, other: Answer) -> bool:
        if (self.finish_reason, self.tokens) != (other.finish_reason, other.tokens):
            return False
        if isinstance(self.content, str) or isinstance(other.content, str):
            return self.content == other.content
        mine, theirs = np.asarray(self.content), np.asarray(other.content)
        return mine.shape == theirs.shape and np.allclose(mine, theirs, rtol=0, atol=TOLERANCE)


@dataclass
class Outcome:
    """What became of one request. Times are of time.perf_counter; `due` is when it should have been sent."""

    door: str
    ask: Ask
    due: float
    first: float = 0.0  # first part of the answer
    end: float = 0.0
    engine_s: float = 0.0  # of the time to the first part, what the engine had of it by its own account
    answer: Answer | None = None
    code: str | None = None  # of the error
    message: str = ""

    @property
    def streamed(self) -> bool:
        return self.door != "generate"


def make_pictures(number: int) -> tuple[list[bytes], list[str]]:
    """PNG files of scenes of the bundled model's kind with two shapes or more, and one shape's kind of each."""
    files: list[bytes] = []
    kinds: list[str] = []
    seed = 0
    while len(files) < number:
        scene = make_scene(seed)
        seed += 1
        if len(scene.items) < 2:
            continue
        file = io.BytesIO()
        Image.fromarray(scene.pixels).save(file, "PNG")
        files.append(file.getvalue())
        kinds.append(scene.items[0].kind)
    return files, kinds


def make_asks(kinds: list[str], max_tokens: int = 64) -> list[Ask]:
    """Every task for every picture, the tasks by turns."""
    asks = []
    for picture, kind in enumerate(kinds):
        for task in TASKS:
            spatial = task in ("detect", "point")
            text = {"query": "What is in the picture?", "caption": None}.get(task, kind)
            options = {"max_objects": 8} if spatial else {"max_tokens": max_tokens, "temperature": 0}
            asks.append(Ask(task, picture, text, options))
    return asks


@dataclass
class Traffic:
    """Clients of one event loop. `grpc` and `http` are host:port."""

    grpc: str
    http: str
    pictures: list[bytes]
    timeout_s: float = 120.0
    _encoded: dict[int, str] = field(default_factory=dict)

    async def __aenter__(self) -> Traffic:
        self.client = AsyncClient(self.grpc)
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=self.timeout_s),
            read_bufsize=LINE_BYTES,
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.client.close()
        await self.session.close()

    async def ask(self, door: str, ask: Ask, due: float | None = None) -> Outcome:
        """Sends it and reads the whole answer. Never raises: what went wrong is in the outcome."""
        outcome = Outcome(door, ask, time.perf_counter() if due is None else due)
        try:
            content: list[Any] = []
            async for part, end in self.parts(door, ask):
                if outcome.answer is not None:
                    raise PhotonError("the answer goes on after its end")
                outcome.first = outcome.first or time.perf_counter()
                content += part
                if end is not None:
                    whole = content if ask.task in ("detect", "point") else "".join(content)
                    outcome.answer = Answer(whole, end["finish_reason"], end["usage"]["output_tokens"])
                    outcome.engine_s = end["usage"]["ttft_ms"] / 1e3
            if outcome.answer is None:
                outcome.code, outcome.message = "LOST", "the answer has no end"
        except PhotonError as error:
            outcome.code, outcome.message = error.code, error.message
        except (aiohttp.ClientError, TimeoutError) as error:
            outcome.code, outcome.message = "CONNECTION", repr(error)
        outcome.end = time.perf_counter()
        outcome.first = outcome.first or outcome.end
        return outcome

    def parts(self, door: str, ask: Ask) -> Parts:
        """(new content, None or the end with finish_reason and usage), as they come. Raises what `ask` catches."""
        return self._grpc(ask) if door == "grpc" else self._generate(ask, stream=door == "generate_stream")

    async def _grpc(self, ask: Ask) -> Parts:
        reply = await self.client.ask(
            ask.task, self.pictures[ask.picture], ask.text, stream=True, timeout=self.timeout_s, options=ask.options
        )
        (stream,) = reply.values()
        try:
            async for part in stream:
                yield [list(part.values()) if isinstance(part, dict) else part], None
            yield [], {"finish_reason": stream.finish_reason, "usage": stream.usage}
        finally:
            stream.close()

    async def _generate(self, ask: Ask, stream: bool) -> Parts:
        path = "generate_stream" if stream else "generate"
        url = f"http://{self.http}/v2/models/photon/{path}"
        async with self.session.post(url, json=self.body(ask, stream)) as reply:
            if not stream:
                yield self._event(ask, await reply.json(content_type=None))
                return
            async for line in reply.content:
                if line.startswith(b"data:"):
                    yield self._event(ask, json.loads(line.removeprefix(b"data:")))
                elif line.strip():
                    yield self._event(ask, json.loads(line))  # refused before the stream began

    def body(self, ask: Ask, stream: bool) -> dict[str, Any]:
        """JSON of generate and generate_stream."""
        if ask.picture not in self._encoded:
            self._encoded[ask.picture] = base64.b64encode(self.pictures[ask.picture]).decode()
        text = {} if ask.text is None else {"text_input": ask.text}
        return {"task": ask.task, "image": self._encoded[ask.picture], "stream": stream, **text, **ask.options}

    @staticmethod
    def _event(ask: Ask, values: dict[str, Any]) -> tuple[list[Any], dict[str, Any] | None]:
        if "error" in values:
            raise from_text(values["error"])
        spatial = {"detect": ("objects", 4), "point": ("points", 2)}.get(ask.task)
        if spatial:
            name, width = spatial
            part = np.asarray(values.get(name, []), np.float32).reshape(-1, width).tolist()
        else:
            part = [values["text_output"]] if values.get("text_output") else []
        if "finish_reason" not in values:
            return part, None
        return part, {"finish_reason": values["finish_reason"], "usage": json.loads(values["usage"])}


def quantiles(seconds: list[float]) -> list[float]:
    """Milliseconds at QUANTILES; [] of nothing."""
    return [float(value) for value in np.percentile(np.array(seconds) * 1e3, QUANTILES)] if seconds else []
