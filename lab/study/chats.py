"""The chat systems that are compared."""

from lab.bench.style import BLUE, GREEN, ORANGE

METHOD = "Ghost Attention"
LINES = {  # label, colour, marker
    "chat-gatt": (f"with {METHOD}", BLUE, "o"),
    "chat-baseline": (f"without {METHOD}", ORANGE, "s"),
    "chat-gatt-all-answers": (f"with {METHOD}, loss of all responses", GREEN, "^"),
}
PAIR = ("chat-gatt", "chat-baseline")
