"""Export of a checkpoint to a verified bundle of ONNX graphs."""

import os

# ONNX Runtime reads this variable on import; see service/runtime/__init__.py.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
