"""Libraries that only some extras of the installation have, and the commands that install them."""

from pathlib import Path

from sightline import __version__

CHECKOUT = Path(__file__).parents[2]
# Names of the libraries by their modules. Those that a part of the work of a command needs have the
# only extra that contains them.
LIBRARIES = {
    "gguf": ("gguf", "import"),
    "onnx": ("ONNX", ""),
    "onnxruntime": ("ONNX Runtime", ""),
    "lxml": ("lxml", "documents"),
    "markdown_it": ("markdown-it-py", "documents"),
    "polib": ("polib", "documents"),
    "yaml": ("PyYAML", "documents"),
    "huggingface_hub": ("huggingface_hub", "import"),
    "ray": ("Ray", "ray"),
    "peft": ("PEFT", "train"),
    "sacrebleu": ("sacreBLEU", "train"),
    "sacremoses": ("Sacremoses", "train"),
    "safetensors": ("safetensors", "import"),
    "torch": ("PyTorch", "train"),
    "transformers": ("Transformers", "train"),
}


def install_command(extras: str, checkout: Path = CHECKOUT) -> str:
    """Return the command that installs comma-separated extras, from the checkout or the release."""
    if not (checkout / "pyproject.toml").is_file():
        return f"run pip install './sightline_serving-{__version__}-py3-none-any.whl[{extras}]'"
    return f"run pip install '.[{extras}]' in {checkout}"


def missing_library(error: ModuleNotFoundError, extras: str) -> str | None:
    """Return the name of the library that is not installed and the command that installs it.

    None if none of the comma-separated extras has the module.
    """
    library, extra = LIBRARIES.get((error.name or "").partition(".")[0], (None, ""))
    if library is None:
        return None
    if extra and extra not in extras.split(","):
        extras = f"cpu,{extra}"
    return f"{library}: {install_command(extras)}"
