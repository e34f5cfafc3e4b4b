"""From a checkpoint to a verified bundle of ONNX graphs."""

import os

# See service/runtime/__init__.py: ONNX Runtime decides when it is imported whether it reports its use to its makers.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
