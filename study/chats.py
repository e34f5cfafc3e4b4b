"""The chat systems that are compared."""

from bench.style import BLUE, GREEN, ORANGE

LINES = {  # label, colour, marker
    "chat-gatt": ("with Ghost Attention", BLUE, "o"),
    "chat-baseline": ("without Ghost Attention", ORANGE, "s"),
    "chat-gatt-all-answers": ("with Ghost Attention, loss of all responses", GREEN, "^"),
}
PAIR = ("chat-gatt", "chat-baseline")
