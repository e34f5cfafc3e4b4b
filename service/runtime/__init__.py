"""Execution of a bundle's graphs with ONNX Runtime."""

import os

# Disable the telemetry of ONNX Runtime. It reads this variable when it is imported, so it is set
# before any module of this package; `disable_telemetry_events` would take effect too late.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"
