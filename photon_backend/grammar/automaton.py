"""Token automata: from a byte automaton and the spelling of the vocabulary to tables over token ids.

All tokens are walked through all states at once. Tokens that went the same way so far are one group with one column of
states, so the work is that of the distinct ways, not of the vocabulary: the thousands of words that a free string takes
are a few groups by their number of characters.
"""

from __future__ import annotations

import json
import time

import numpy as np

from photon_backend.grammar.constraint import TokenAutomaton
from photon_backend.grammar.dfa import Dfa, TooLarge, build_dfa
from photon_backend.grammar.json_text import parse_schema
from photon_backend.grammar.regular import Either, Node, NotRegular, literal, parse_regex
from photon_backend.grammar.spelling import Spelling
from photon_backend.protocol import GrammarSpec

MAX_STATES = 4096


def compile_automaton(spec: GrammarSpec, spelling: Spelling, max_words: int) -> TokenAutomaton:
    """Raises NotRegular when the grammar is of another kind, TooLarge when it passes the limits."""
    return token_automaton(build_dfa(regular_language(spec), MAX_STATES), spelling, max_words)


def regular_language(spec: GrammarSpec) -> Node:
    """Raises NotRegular."""
    if spec.kind == "choice":
        return Either(tuple(literal(choice) for choice in json.loads(spec.text)))
    if spec.kind == "regex":
        return parse_regex(spec.text)
    if spec.kind == "json_schema":
        return parse_schema(json.loads(spec.text))
    raise NotRegular("a Lark grammar")


def token_automaton(dfa: Dfa, spelling: Spelling, max_words: int) -> TokenAutomaton:
    num_states = len(dfa.accepting)
    words = -(-len(spelling.lengths) // 32)
    if num_states * words + len(spelling.lengths) > max_words:
        raise TooLarge(f"masks of {num_states} states need more than {max_words} words")
    classes, columns = _classes(dfa, spelling, max_words // num_states)
    reached = columns.T  # [states, classes], -1: not legal
    masks = _masks(reached >= 0, classes, dfa.accepting, spelling.eos_id)
    if not masks.any(axis=1).all():
        raise NotRegular("the vocabulary cannot spell it")
    stays = np.arange(num_states, dtype=np.int32)[:, None]
    next_state = np.ascontiguousarray(np.where(reached < 0, stays, reached))
    automaton = TokenAutomaton(masks, classes, next_state)
    if automaton.num_words > max_words:
        raise TooLarge(f"tables of {automaton.num_words} words, at most {max_words} are allowed")
    return automaton


def _classes(dfa: Dfa, spelling: Spelling, max_columns: int) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, int32 [V], and the state that each class leads to from each state: [classes, states].

    Class 0 holds the tokens that are legal nowhere.
    """
    num_states, num_classes = dfa.next_state.shape
    nowhere = np.full((1, num_classes), -1, np.int32)  # state -1 leads to itself
    move = np.vstack([dfa.next_state, nowhere]).T.copy()  # [byte classes, states + 1]
    classes = np.zeros(len(spelling.lengths), np.int32)
    found = [np.full(num_states, -1, np.int32)]
    index = {found[0].tobytes(): 0}
    tokens = np.flatnonzero(spelling.lengths)  # that go on
    group = np.zeros(len(tokens), np.int64)  # of each: tokens of a group have gone to the same states so far
    columns = np.arange(num_states, dtype=np.int32)[None]  # those states, a line per group
    for position in range(spelling.bytes.shape[1]):
        symbol = dfa.byte_class[spelling.bytes[tokens, position]]
        ways, way = np.unique(group * num_classes + symbol, return_inverse=True)
        if len(ways) > 8 * max_columns:
            raise TooLarge(f"tokens go more than {8 * max_columns} ways")
        columns, merged = _distinct(move[(ways % num_classes)[:, None], columns[ways // num_classes]])
        group = merged[way]
        ends = spelling.lengths[tokens] == position + 1
        number = np.zeros(len(columns), np.int32)
        for i in np.unique(group[ends]):
            number[i] = index.setdefault(columns[i].tobytes(), len(found))
            if number[i] == len(found):
                found.append(columns[i])
        classes[tokens[ends]] = number[group[ends]]
        goes_on = ~ends & (columns >= 0).any(axis=1)[group]
        tokens, group = tokens[goes_on], group[goes_on]
        time.sleep(0)  # lets the engine thread have the interpreter
        if not len(tokens):
            break
    return classes, np.stack(found)


def _distinct(lines: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct lines of int32 [lines, states], and for each line its number among them.

    Sorting lines is slow, so they are told apart by a 64-bit hash, and compared with what they are merged with.
    """
    factors = np.random.RandomState(0).randint(1 << 62, size=lines.shape[1], dtype=np.int64) * 2 + 1
    _, first, number = np.unique(lines.astype(np.int64) @ factors, return_index=True, return_inverse=True)
    assert (lines == lines[first[number]]).all()
    return lines[first], number


def _masks(legal: np.ndarray, classes: np.ndarray, accepting: np.ndarray, eos_id: int) -> np.ndarray:
    """int32 [states, ceil(V / 32)] from bool [states, classes]; some states at a time: a bool per state and token is
    large."""
    size = len(classes)
    masks = np.zeros((len(legal), -(-size // 32)), np.int32)
    bits = np.zeros((64, masks.shape[1] * 32), bool)
    for start in range(0, len(legal), len(bits)):
        number = min(len(bits), len(legal) - start)
        part = bits[:number]
        np.take(legal[start : start + number], classes, axis=1, out=part[:, :size])
        part[:, eos_id] = accepting[start : start + number]
        masks[start : start + number] = np.packbits(part, axis=1, bitorder="little").view(np.int32)
        time.sleep(0)
    return masks
