"""What a commit knows of every row, as arrays: a step's tokens are counted and sent without a Python object for each.

B: sequences of a step, R: rows, V: vocabulary. numpy only, engine thread only.

Invariants
- A line means something from `begin`, when its request is admitted, until its row is released.
- A token that is not `looked_at` changes nothing about its request but their number: it is not the first one, not the
  last one, none that ends an answer or its reasoning, and no host grammar has to hear of it.
- All tokens that a step brings to one client are one message.

Price: a dozen calls of numpy a step, which a row alone would do without; see docs/numbers.md.
"""

from __future__ import annotations

from itertools import count

import numpy as np

from photon_backend.engine.sequence import Sequence
from photon_backend.model.config import TokenizerConfig
from photon_backend.protocol import REQUEST_ID_BYTES, StepTokens

ALWAYS = 0  # as `look_from`


class Ledger:
    """By row:

    emitted    int64  [R]  tokens committed and handed to the client
    look_from  int64  [R]  once so many are, each token is looked at
    carries    bool   [R]  its coord and size ids bring values
    """

    def __init__(self, rows: int, vocab_size: int, special: TokenizerConfig) -> None:
        self.emitted = np.zeros(rows, np.int64)
        self.look_from = np.zeros(rows, np.int64)
        self.carries = np.zeros(rows, bool)
        self._request_ids = np.zeros(rows, f"S{REQUEST_ID_BYTES}")
        self._clients = [b""] * rows  # [R]
        self._client = np.zeros(rows, np.int64)  # [R]: its number
        self._number: dict[bytes, int] = {}  # of a client; none is used twice
        self._numbers = count()
        self._ends = np.zeros(vocab_size, bool)  # [V]: an answer, or its reasoning
        self._ends[[special.eos_id, special.answer_id]] = True
        self._values_of = np.zeros(vocab_size, np.int64)  # [V]: how many come with an id
        self._values_of[[special.coord_id, special.size_id]] = 1, 2

    def begin(self, sequence: Sequence) -> None:
        """A request was admitted to its row. `carries` is set by the look at its first token."""
        row, client = sequence.row, sequence.client
        if client not in self._number:
            self._number[client] = next(self._numbers)
        self._clients[row], self._client[row] = client, self._number[client]
        self._request_ids[row] = sequence.request.request_id
        self.emitted[row], self.look_from[row] = 0, ALWAYS

    def forget(self, client: bytes) -> None:
        """It is gone, and needs no number any more."""
        self._number.pop(client, None)

    def looked_at(self, rows: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Whether something may depend on a token but its number: bool [B], of rows and ids, int64 [B] both."""
        return self._ends.take(ids) | (self.emitted.take(rows) >= self.look_from.take(rows))

    def emit(self, rows: np.ndarray, ids: np.ndarray, values: np.ndarray) -> list[tuple[bytes, StepTokens]]:
        """Counts a token of each row and gives the messages that bring them, by client.

        rows, ids: int64 [B], B at least 1. values: float32 [B, 2], what the ids stand for, if anything.
        """
        self.emitted.put(rows, self.emitted.take(rows) + 1)
        brought = self._brought(rows, ids, values)
        numbers = self._client.take(rows)
        order = numbers.argsort(kind="stable")
        rows, numbers, ids = rows.take(order), numbers.take(order), ids.take(order).astype(np.int32)
        request_ids = self._request_ids.take(rows)
        begins = [0, *((numbers[1:] != numbers[:-1]).nonzero()[0] + 1).tolist()]
        messages = []
        for begin, end in zip(begins, [*begins[1:], len(numbers)], strict=True):
            pairs = b"" if brought is None else brought.take(order[begin:end], axis=0).tobytes()
            message = StepTokens(request_ids[begin:end].tobytes(), ids[begin:end].tobytes(), pairs)
            messages.append((self._clients[rows[begin]], message))
        return messages

    def _brought(self, rows: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray | None:
        """The values, with NaN where an id brings none; None when no id of the step brings any."""
        number = self._values_of.take(ids) * self.carries.take(rows)
        if not np.count_nonzero(number):
            return None
        return np.where(np.arange(2) < number[:, None], values, np.float32(np.nan))
