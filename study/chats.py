"""The two chat systems that are compared."""

from bench.style import BLUE, ORANGE
from model.data.instructions import Kind

MODELS = {"chat-gatt": "with Ghost Attention", "chat-baseline": "without"}  # with their labels in tables
LINES = {  # label in pictures, colour, marker
    "chat-gatt": ("with Ghost Attention", BLUE, "o"),
    "chat-baseline": ("without Ghost Attention", ORANGE, "s"),
}
TITLES: dict[Kind, str] = {  # of the panels of a kind of instruction
    "capitals": "capitals\nwrite in capital letters",
    "ending": "ending\nend with a given word",
    "person": "person\nplay a named person",
    "greeting": "greeting\nstart with a greeting",
}
