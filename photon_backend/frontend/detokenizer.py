"""From ids to text, a few at a time. The deltas joined are always exactly what decoding all ids at once gives.

Works for byte-level vocabularies: a token is some bytes, perhaps only a part of a character. What makes it exact: an
unfinished UTF-8 sequence is at most three bytes and decodes to one U+FFFD at the very end, so everything before that is
final. The cost per token is decoding a window of ids, not the whole answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from photon_backend.model.tokenizer import TextTokenizer

_REPLACEMENT = "\ufffd"
_MAX_WINDOW = 16  # ids


class Detokenizer:
    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._decode = tokenizer.decode
        self._window: list[int] = []  # since the last border between characters
        self._given = 0  # characters of the window's text that were returned

    def feed(self, token_id: int) -> str:
        """The text that is certain now; empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        unfinished = text.endswith(_REPLACEMENT)  # or bytes that are no UTF-8 at all: then known one token later
        end = len(text) - unfinished
        delta = text[self._given : end]
        self._given = end
        if not unfinished:
            self._window, self._given = [], 0
        elif len(self._window) > _MAX_WINDOW:
            self._shrink()
        return delta

    def flush(self) -> str:
        """What is left when no more ids come: an unfinished character becomes U+FFFD, as in the whole decode."""
        text = self._decode(self._window)[self._given :]
        self._window, self._given = [], 0
        return text

    def _shrink(self) -> None:
        """Keeps three ids that have bytes: an unfinished sequence starts in them, and from its first byte on decoding
        does not depend on what came before."""
        self._window = [token_id for token_id in self._window if self._decode([token_id])][-3:]
        self._given = len(self._decode(self._window)) - 1


class StopFilter:
    """Cuts text before the first stop string, and holds back what may become one.

    First is the one that ends first, the longest of those that end together, so how text is split never matters.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, delta: str) -> tuple[str, bool]:
        """(text to send, whether a stop string was completed: then nothing may be fed any more)."""
        if not self._stops:
            return delta, False
        text = self._held + delta
        ends = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            end, minus_length = min(ends)
            return text[: end + minus_length], True
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """Held text, when no more comes."""
        held, self._held = self._held, ""
        return held

    def _possible_start(self, text: str) -> int:
        """Characters at the end of the text that begin a stop string; the largest such number."""
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
