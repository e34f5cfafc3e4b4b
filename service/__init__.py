"""The HTTP service: ASGI endpoints, one engine thread, ONNX Runtime. It does not import torch."""
