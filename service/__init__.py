"""The HTTP service: ASGI endpoints, one engine thread, ONNX Runtime. It does not import torch."""

__version__ = "0.3.0"
