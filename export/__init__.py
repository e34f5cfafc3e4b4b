"""From a checkpoint to a verified bundle of ONNX graphs."""
