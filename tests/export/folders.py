"""Names of the files in a bundle folder."""

from pathlib import Path

BUNDLE_FILES = {"manifest.json", "encoder.onnx", "step.onnx", "weights.bin", "tokenizer.json"}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}
