"""What crosses the boundary between a front end and the engine.

Every message is a msgspec struct with a tag, so one decoder per direction reads them all and refuses anything else.
A ZeroMQ message is one frame that holds a msgpack list of structs; a `Picture` is alone in its list and brings its
pixels as a second, raw frame.

Order for one request:

    front end                      engine
    Submit (digest only)     ->
                             <-    NeedPicture            only when the prefix of that digest is not cached
    Picture + pixels         ->
                             <-    StepTokens ...         each with tokens of many requests
                             <-    Done | Failed          exactly one of them, once, whatever happens
    Cancel (any time)        ->                           a normal end: answered with Done(reason="cancelled")

`request_id` is chosen by the front end and unique within that front end's connection; printable ASCII, at most
REQUEST_ID_BYTES. `name` is what the client calls the request; nothing makes it unique. `Stop` ends all requests of a
name, whoever's they are, and has no answer of its own: a supervisor passes it on for a client that has lost, or shares,
the stream of its request. `Record` comes from a supervisor too and is answered by one Recorded, or Failed at once while
another recording runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from struct import iter_unpack
from typing import Annotated, Literal, get_args

import msgspec

Task = Literal["query", "caption", "detect", "point"]
FinishReason = Literal["stop", "length", "cancelled", "deadline"]
ErrorCode = Literal["INVALID_ARG", "UNAVAILABLE", "INTERNAL"]

TASKS: tuple[Task, ...] = get_args(Task)
REQUEST_ID_BYTES = 24
MAX_TRACE_TICKS = 2000  # some 14 spans each: a few MiB
MAX_TRACE_S = 60.0


class PhotonError(Exception):
    """An error with a code that a client may rely on. `str()` gives `[CODE] sentence`."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(f"[{code}] {message}")
        self.code: ErrorCode = code
        self.message = message


def unavailable(reason: str, retry_s: int) -> PhotonError:
    """`[UNAVAILABLE] reason; retry after n s`: the hint is a guess that a client may take by machine or by eye."""
    return PhotonError("UNAVAILABLE", f"{reason}; retry after {retry_s} s")


class Sampling(msgspec.Struct, frozen=True):
    """How text tokens are drawn. Spatial values are always greedy."""

    temperature: float = 0.5  # 0 is greedy
    top_p: float = 0.3  # keep the smallest set of tokens whose probability passes this; 1 keeps all
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    max_tokens: int = 768  # of the answer; reasoning has the same allowance of its own, as in the reference
    seed: int = 0  # 0 .. 2**63-1; the front end draws one when the user gives none


class GrammarSpec(msgspec.Struct, frozen=True):
    """What the text of an answer must be. With reasoning it binds the answer only."""

    kind: Literal["json_schema", "regex", "choice", "lark"]
    text: str  # a JSON schema, a regular expression, a JSON list of strings, or a grammar in llguidance's Lark dialect


class Submit(msgspec.Struct, tag="submit"):
    request_id: str
    task: Task
    prompt_ids: list[int]  # what follows BOS + image; starts with BOS when there is no picture
    digest: bytes | None = None  # 16 bytes, of the encoded picture and the preprocessing version; None: no picture
    coords: list[float] = []  # values of the coord ids in prompt_ids, in order, 0..1
    sizes: list[tuple[float, float]] = []  # (width, height) of the size ids in prompt_ids, in order, 0..1
    reasoning: bool = False
    max_objects: int = 50  # detect and point
    max_time_ms: float = 0.0  # from the arrival at the engine; 0: no deadline
    sampling: Sampling = Sampling()
    grammar: GrammarSpec | None = None  # query and caption
    name: str = ""  # the client's own id of the request, if it gave one


class Picture(msgspec.Struct, tag="picture"):
    """The crops of a picture; pixels follow as one raw frame: uint8 [num_crops, crop_size, crop_size, 3], RGB."""

    request_id: str
    tiling: tuple[int, int]  # (rows, columns) of tiles; num_crops = 1 + rows * columns


class Cancel(msgspec.Struct, tag="cancel"):
    request_id: str


class Stop(msgspec.Struct, tag="stop"):
    """Ends every open request of that name, of any client, as cancelled."""

    name: str


class Record(msgspec.Struct, tag="record"):
    """Asks for a recording of the next ticks, or of what ran within `seconds`, whichever ends first."""

    request_id: str
    ticks: Annotated[int, msgspec.Meta(ge=1, le=MAX_TRACE_TICKS)]
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_TRACE_S)]


class Hello(msgspec.Struct, tag="hello"):
    """First message of a front end. Answered with a Beat."""


class NeedPicture(msgspec.Struct, tag="need_picture"):
    request_id: str


class Tokens(msgspec.Struct):
    """New tokens of one request, taken out of StepTokens. The terminating eos is not among them.

    A coord id brings one value (0..1), a size id two (width, height, 0..1), an ordinary id none.
    """

    request_id: str
    ids: list[int]
    values: list[float] = []


class StepTokens(msgspec.Struct, tag="tokens"):
    """What a step brings to one client: the next token of each of n requests. Arrays, so that no object is made for a
    token where they are sent; `unpacked` makes them where they are read."""

    request_ids: bytes  # [n] of REQUEST_ID_BYTES each, filled up with zeros
    ids: bytes  # int32 [n]
    values: bytes = b""  # float32 [n, 2], NaN where an id brings none; empty when none brings any

    def by_request(self) -> Iterator[Tokens]:
        names = iter_unpack(f"{REQUEST_ID_BYTES}s", self.request_ids)
        pairs = iter_unpack("2f", self.values) if self.values else repeat((), len(self.ids) // 4)
        for (name,), (token,), pair in zip(names, iter_unpack("i", self.ids), pairs, strict=True):
            yield Tokens(name.rstrip(b"\0").decode(), [token], [value for value in pair if value == value])


class Usage(msgspec.Struct):
    input_tokens: int = 0  # image prefix and prompt
    cached_tokens: int = 0  # of the input, taken from the prefix cache
    output_tokens: int = 0
    queue_ms: float = 0.0  # from Submit at the engine to the launch of the prefill, waiting for the picture included
    ttft_ms: float = 0.0  # from Submit at the engine to the commit of the first token
    decode_ms: float = 0.0  # from the first token to the last


class Done(msgspec.Struct, tag="done"):
    request_id: str
    reason: FinishReason
    usage: Usage


class Failed(msgspec.Struct, tag="failed"):
    request_id: str
    code: ErrorCode
    message: str
    refused: bool = False  # it was never accepted


class Span(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Something that took time: a phase of a tick, or work of the device for a step."""

    lane: str  # see engine/trace.py
    number: int  # of the tick in a host lane, of the step in a device lane
    begin: float  # seconds on the monotonic clock of the engine's machine
    end: float


class Recorded(msgspec.Struct, tag="recorded"):
    request_id: str
    spans: list[Span]


# Why a step was launched with nothing in flight: the mode; the engine had been idle; every row had launched its last
# token and nobody waited; those that waited found no row or pages; they waited for their picture or their grammar.
ALONE = ("blocking", "idle", "nothing_to_launch", "no_room", "not_ready")


class Status(msgspec.Struct):
    """Counters since the engine's start, and gauges. submitted = done + failed + cancelled + open requests, and
    steps = steps_overlapped + steps_deferred + all of steps_alone."""

    model: str = ""
    device: str = ""
    overlap: bool = True
    rows: int = 0
    rows_in_use: int = 0
    pages: int = 0
    pages_in_use: int = 0
    waiting: int = 0
    running: int = 0
    zombies: int = 0
    submitted: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: int = 0
    steps: int = 0
    steps_overlapped: int = 0  # queued whole, forward and sampling, while another one was uncommitted
    steps_alone: dict[str, int] = {}  # launched while none was, by the reasons of ALONE
    prefix_entries: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    host_ms: float = 0.0  # host time of all ticks, waiting excluded
    ticks: int = 0
    device_busy_ms: float = 0.0  # of the compute stream, in steps
    device_idle_ms: float = 0.0  # between two steps that followed each other: the bubble
    steps_deferred: int = 0  # sampled only after the commit of the step before: a host grammar was behind
    constrained_device: int = 0  # requests whose grammar ran as tables on the device
    constrained_host: int = 0  # requests whose grammar ran in a host matcher
    constrained_fallback: int = 0  # of those, regular ones whose tables were too large or found no room


class Beat(msgspec.Struct, tag="beat"):
    """Heartbeat of the engine to each front end and to its supervisor, every `beat_ms`."""

    status: Status


ToEngine = Submit | Picture | Cancel | Stop | Record | Hello
FromEngine = NeedPicture | StepTokens | Done | Failed | Recorded | Beat
Heard = NeedPicture | Tokens | Done | Failed | Recorded | Beat  # the same, with the tokens of each request on their own

_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(list[ToEngine])
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode(messages: Sequence[ToEngine] | Sequence[FromEngine]) -> bytes:
    return _encoder.encode(messages)


def decode_to_engine(frame: bytes) -> list[ToEngine]:
    """Raises msgspec.MsgspecError when the frame is not a list of known messages."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: bytes) -> list[FromEngine]:
    """Raises msgspec.MsgspecError when the frame is not a list of known messages."""
    return _from_engine.decode(frame)


def unpacked(messages: Iterable[FromEngine]) -> Iterator[Heard]:
    """In order, with the tokens of each request on their own."""
    for message in messages:
        if isinstance(message, StepTokens):
            yield from message.by_request()
        else:
            yield message
