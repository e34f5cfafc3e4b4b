"""The two chat systems that are compared."""

MODELS = {"chat-gatt": "with Ghost Attention", "chat-baseline": "without"}  # with their labels in tables and pictures
COLOURS = {"chat-gatt": "#1d4e89", "chat-baseline": "#d17b0f"}
