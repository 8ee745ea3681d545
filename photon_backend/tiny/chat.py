"""Questions that come without a picture."""

from __future__ import annotations

import random

from photon_backend.tiny.question import Question, typed
from photon_backend.tiny.scenes import COLORS, KINDS
from photon_backend.tiny.words import listing, plural

_DIGITS = "zero one two three four five six seven eight nine ten"
DIGITS = tuple(_DIGITS.split())
TALK = (
    (("Hello", "Hi", "Good morning", "Hey", "Hello there"), "Hello! Show me a picture of shapes."),
    (("Who are you?", "What are you?", "What is your name?"), "I am a small model that looks at pictures of shapes."),
    (
        ("What can you do?", "How can you help me?", "What do you do?", "Help"),
        "I describe pictures of shapes, answer questions, find objects and read short texts.",
    ),
    (("Thank you", "Thanks"), "You are welcome."),
    (("How are you?", "How do you do?"), "I am fine, thank you."),
    (("Goodbye", "Bye"), "Goodbye!"),
    (
        ("What colors do you know?", "Which colors do you know?", "Name the colors.", "List all colors you know."),
        f"I know {listing(COLORS)}.",
    ),
    (
        ("What shapes do you know?", "Which shapes do you know?", "Name the shapes.", "List all shapes you know."),
        f"I know {listing([plural(kind) for kind in KINDS])}.",
    ),
    (("How many corners does a square have?", "How many sides does a square have?"), "four"),
    (("How many corners does a triangle have?", "How many sides does a triangle have?"), "three"),
    (("How many corners does a circle have?",), "none"),
    (("What is the capital of France?", "Tell me a joke.", "What time is it?"), "I only know about shapes."),
    (("What color is the sky?",), "blue"),
    (("What color is grass?",), "green"),
)
LOOKING = (
    "What color is the {kind}?",
    "How many {kinds} are there?",
    "What is in the picture?",
    "Describe the picture.",
    "What do you see?",
    "Is there a {kind}?",
    "Where is the {kind}?",
    "What is written?",
)
SUMS = ("What is {a} plus {b}?", "How much is {a} plus {b}?", "{a} + {b} = ?", "Add {a} and {b}.")


def ask_without_picture(rng: random.Random) -> Question:
    draw = rng.random()
    if draw < 0.45:
        first = rng.randint(0, 10)
        second = rng.randint(0, 10 - first)
        text = rng.choice(SUMS[:3]).format(a=DIGITS[first], b=DIGITS[second])
        if rng.random() < 0.4:
            text = rng.choice(SUMS).format(a=first, b=second)
        return _chat(rng, text, DIGITS[first + second])
    if draw < 0.65:
        kind = rng.choice(KINDS)
        return _chat(rng, rng.choice(LOOKING).format(kind=kind, kinds=plural(kind)), "I see no picture.")
    questions, answer = rng.choice(TALK)
    return _chat(rng, rng.choice(questions), answer)


def _chat(rng: random.Random, text: str, answer: str) -> Question:
    return Question("query", "no picture", typed(rng, text), answer, picture=False)
