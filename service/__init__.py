"""The server: HTTP at the edge, one engine thread within, ONNX Runtime below. It never imports torch."""

__version__ = "0.1.0"
