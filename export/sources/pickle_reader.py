"""Convert a PyTorch pickle of weights to safetensors.

`sightline.export.sources.opened_checkpoint` runs `python -P export/sources/pickle_reader.py SOURCE
OUT` in a child process. PyTorch reads only tensors (`weights_only=True`); anything else in the
pickle is an error and is not executed. The last line of standard error is the reason of a failure.
This script imports no other module of this project, because the project may not be in the import
path of the child process.
"""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

NOT_INSTALLED = (
    "reading pickled weights needs PyTorch: pip install '.[train]', or use a checkpoint with model.safetensors"
)
CONVERT = (
    "convert it on a trusted machine: load the model with transformers' from_pretrained, and save it with "
    "save_pretrained, which writes safetensors"
)


def main(source: Path, out: Path) -> None:
    try:
        import torch
    except ModuleNotFoundError:
        sys.exit(NOT_INSTALLED)
    dtypes = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"} | {
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint8: "U8",
        torch.bool: "BOOL",
    }
    try:
        # Files from before PyTorch 1.6 are not zip archives and cannot be mapped into memory.
        weights: Any = torch.load(source, "cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        sys.exit(f"the pickle has more than tensors or is damaged, so it is not read ({reason}); {CONVERT}")
    if isinstance(weights, dict) and isinstance(weights.get("state_dict"), dict):
        weights = weights["state_dict"]
    if not isinstance(weights, dict) or not weights:
        sys.exit(f"the pickle has no dictionary of tensors; {CONVERT}")
    for name, tensor in weights.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            sys.exit(f"the pickle has the entry {name!r}, which is not a tensor; {CONVERT}")
        if tensor.dtype not in dtypes or tensor.layout != torch.strided:
            sys.exit(f"the tensor {name} has the unsupported type {tensor.dtype} or layout {tensor.layout}; {CONVERT}")
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in weights.items():
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": dtypes[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    try:
        with out.open("xb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in weights.values():
                if tensor.numel():
                    file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
    except OSError as error:
        sys.exit(
            f"the pickle cannot be converted in {out.parent.parent}, which needs {end:,} bytes: {error.strerror}; "
            "remove files, or set TMPDIR to a folder on another disk"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
