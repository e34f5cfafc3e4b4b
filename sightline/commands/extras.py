"""Libraries that only some extras of the installation have, and the names of these extras."""

from sightline.base.extras import install_command

# Names of the libraries by their modules.
LIBRARIES = {
    "gguf": "gguf",
    "onnx": "ONNX",
    "onnxruntime": "ONNX Runtime",
    "huggingface_hub": "huggingface_hub",
    "jinja2": "Jinja",
    "ray": "Ray",
    "sacrebleu": "sacreBLEU",
    "sacremoses": "Sacremoses",
    "safetensors": "safetensors",
    "torch": "PyTorch",
}
# The only extra that has a library, for libraries that a part of the work of a command needs.
EXTRA_OF = {
    "gguf": "import",
    "huggingface_hub": "import",
    "Jinja": "import",
    "PyTorch": "train",
    "Ray": "ray",
    "sacreBLEU": "train",
    "Sacremoses": "train",
    "safetensors": "train",
}


def missing_library(error: ModuleNotFoundError, extras: str) -> str | None:
    """Return the name of the library that is not installed and the command that installs it.

    None if none of the comma-separated extras has the module.
    """
    library = LIBRARIES.get((error.name or "").partition(".")[0])
    if library is None:
        return None
    if library in EXTRA_OF and EXTRA_OF[library] not in extras.split(","):
        extras = f"cpu,{EXTRA_OF[library]}"
    return f"{library}: {install_command(extras)}"
