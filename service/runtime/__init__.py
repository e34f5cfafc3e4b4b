"""What runs a bundle's graphs: ONNX Runtime, or a deterministic fake."""
