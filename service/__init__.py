"""The server: HTTP at the edge, one engine thread within, ONNX Runtime below. It never imports torch."""
