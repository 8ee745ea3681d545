"""One request inside the engine: a passive record. Who sets what is said per field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from photon_backend.protocol import FinishReason, Submit

if TYPE_CHECKING:
    import numpy as np

    from photon_backend.engine.prefix_cache import PrefixEntry
    from photon_backend.engine.tables import Block
    from photon_backend.grammar.spatial import RowProgram


@dataclass(eq=False)
class Sequence:
    # set once, by the engine at intake
    client: bytes
    request: Submit
    program: RowProgram  # what the device automaton of its row does
    prefix_len: int  # positions of the image prefix; 0 without a picture
    prompt_len: int  # positions of prefix and prompt together
    limit: int  # tokens it may launch; lowered by the engine when reasoning ends (see `launchable`)
    arrival: float  # seconds, monotonic
    deadline: float = float("inf")  # seconds, monotonic
    matcher: Any = None  # host grammar, or None; set by Constraints when it is compiled, as the next two are
    tables: Block | None = None  # where the tables of its token automaton are, if it has one
    compiling: bool = False  # its grammar is not ready, so it may not be admitted

    # set by the engine while it waits
    pixels: np.ndarray | None = None  # uint8 [C, side, side, 3], until the prefill is launched
    tiling: tuple[int, int] = (1, 1)

    # set by the scheduler: admit and release
    row: int = -1
    pages: list[int] = field(default_factory=list)  # in order of position; a reference is held on each
    entry: PrefixEntry | None = None  # prefix it reads or computes
    cached_len: int = 0  # positions taken from the prefix cache

    # set by the pipeline
    inflight: int = 0  # uncommitted steps it rides in
    planned: int = 0  # tokens launched

    # set by the engine at commit, cancel and failure
    answering: bool = True  # False while it reasons
    finished: FinishReason | str = ""  # the reason, or "failed"; empty while it runs
    launch_time: float = 0.0
    first_token_time: float = 0.0

    @property
    def launchable(self) -> bool:
        """Whether one more token may be launched.

        P8: planned tokens are counted at launch, so a length limit never makes a zombie. While a row reasons, `limit`
        is reasoning + 1 + answer; the commit that sees the end of reasoning lowers it to that token + answer, and since
        at most one step is in flight behind it and an answer has at least one token, `planned` never passes it.
        """
        return not self.finished and self.planned < self.limit

    @property
    def asks_matcher(self) -> bool:
        """Whether its next token needs a mask from the host. A constraint begins with the answer: reasoning is free."""
        return self.matcher is not None and self.answering and not self.finished

    @property
    def zombie(self) -> bool:
        return bool(self.finished) and self.inflight > 0
