"""The two systems that chat, which are compared."""

MODELS = {"chat-gatt": "with Ghost Attention", "chat-baseline": "without"}  # how tables and pictures call them
COLOURS = {"chat-gatt": "#1d4e89", "chat-baseline": "#d17b0f"}
