"""Runs the graphs of a bundle with ONNX Runtime."""

import os

# ONNX Runtime reports its use to its makers over the network. It decides when it is imported, so this comes before any
# module of this package; its own `disable_telemetry_events` comes too late.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
