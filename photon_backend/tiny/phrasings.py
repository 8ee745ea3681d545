"""The ways in which one question can be put. Words in braces are filled in by the questions that use them."""

COLOR_OF = (
    "What color is the {it}?",
    "What is the color of the {it}?",
    "Which color is the {it}?",
    "Which color does the {it} have?",
    "What color does the {it} have?",
    "Tell me the color of the {it}.",
    "The {it} is what color?",
)
COLORS_OF = ("What color are the {it}?", "Which colors do the {it} have?", "What colors are the {it}?")
ALL_COLORS = (
    "What colors do you see?",
    "Which colors are in the picture?",
    "What colors are there?",
    "What colors do the objects have?",
    "List the colors.",
)
SHAPE_OF = (
    "What shape is the {it}?",
    "Which shape is the {it}?",
    "What kind of shape is the {it}?",
    "What shape does the {it} have?",
    "What is the shape of the {it}?",
)
KIND_OF = ("What is the {it}?", *SHAPE_OF)
KINDS_OF = ("What shapes are {it}?", "Which shapes are {it}?", "Which objects are {it}?", "What is {it}?")
ALL_KINDS = (
    "What shapes do you see?",
    "Which shapes are in the picture?",
    "What shapes are there?",
    "What kinds of shapes are there?",
    "List the shapes.",
)
SIZE_OF = ("What size is the {it}?", "How big is the {it}?", "How large is the {it}?", "What is the size of the {it}?")
COUNT_OF = (
    "How many {it} are there?",
    "How many {it} are there?",
    "How many {it} do you see?",
    "How many {it} are in the picture?",
    "How many {it} are in the image?",
    "How many {it} can you see?",
    "How many {it}?",
    "Count the {it}.",
    "What is the number of {it}?",
    "Number of {it}?",
)
PRESENCE_OF = (
    "Is there {a}?",
    "Is there {a} in the picture?",
    "Is there {a} in the image?",
    "Do you see {a}?",
    "Can you see {a}?",
    "Does the picture show {a}?",
    "Does the image contain {a}?",
    "Are there any {them}?",
    "Are there any {them} in the picture?",
    "Are there {them}?",
    "Do you see any {them}?",
)
WRITTEN = (
    "What is written?",
    "What is written in the picture?",
    "What is written here?",
    "What does the text say?",
    "What does it say?",
    "What text is in the picture?",
    "What text do you see?",
    "Read the text.",
    "Read it.",
    "Which {noun} is written?",
    "What {noun} is printed?",
    "What {noun} is shown?",
    "Which {noun} do you see?",
    "What is the {noun}?",
)
DESCRIBE = (
    "What do you see?",
    "What is in the picture?",
    "What is in this image?",
    "What is shown?",
    "Describe the picture.",
    "Describe the image.",
    "What does the picture show?",
    "What is this?",
)
SAME_COLOR = ("Do the {one} and the {two} have the same color?", "Are the {one} and the {two} the same color?")
MORE = ("Are there more {one} than {two}?",)
ANY_TEXT = ("Is there any text?", "Is something written?", "Is there text in the picture?", "Do you see any text?")
EMPTY = ("Is the picture empty?", "Is there nothing in the picture?")
WHERE = ("Where is the {it}?", "Where do you see the {it}?", "In which part of the picture is the {it}?")
BACKGROUND_COLOR = (
    "What color is the background?",
    "What is the color of the background?",
    "Which color is the background?",
)
BACKGROUND_STYLE = ("What pattern does the background have?", "What kind of background is it?")
BACKGROUND = ("Describe the background.", "What does the background look like?")

EXTREMES = {
    "left": ("leftmost {it}", "{it} on the far left", "{it} furthest to the left", "first {it} from the left"),
    "right": ("rightmost {it}", "{it} on the far right", "{it} furthest to the right", "first {it} from the right"),
    "top": ("topmost {it}", "highest {it}", "{it} at the very top", "{it} furthest up"),
    "bottom": ("bottommost {it}", "lowest {it}", "{it} at the very bottom", "{it} furthest down"),
    "largest": ("largest {it}", "biggest {it}"),
    "smallest": ("smallest {it}",),
}
