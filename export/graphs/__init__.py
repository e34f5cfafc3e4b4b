"""ONNX graphs of a described model.

Axes: B batch, S tokens of the source (or of one call of a decoder), M width, H heads, D width of a
head, V vocabulary.
"""
