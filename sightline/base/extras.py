"""Commands that install extras of the package."""

from collections.abc import Mapping
from pathlib import Path

from sightline import __version__

CHECKOUT = Path(__file__).parents[2]
# Extras of the environments that the Makefile creates.
ENVIRONMENTS: Mapping[str, frozenset[str]] = {
    ".venv-serve-cpu": frozenset({"cpu", "documents", "import"}),
    ".venv": frozenset({"cpu", "train", "dev", "bench", "documents", "import"}),
}


def install_command(extras: str, checkout: Path = CHECKOUT) -> str:
    """Return the command that installs comma-separated extras, from the checkout or the release."""
    if not (checkout / "pyproject.toml").is_file():
        return f"run pip install './sightline_serving-{__version__}-py3-none-any.whl[{extras}]'"
    for environment, contained in ENVIRONMENTS.items():
        if contained >= set(extras.split(",")):
            return (
                f"run `make {environment}/ready` and use {environment}/bin/sightline, or run pip install "
                f"'.[{extras}]'; both in {checkout}"
            )
    return f"run pip install '.[{extras}]' in {checkout}"
