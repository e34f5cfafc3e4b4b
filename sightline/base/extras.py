"""Commands that install extras of the package."""

from pathlib import Path

from sightline import __version__

CHECKOUT = Path(__file__).parents[2]


def install_command(extras: str, checkout: Path = CHECKOUT) -> str:
    """Return the command that installs comma-separated extras, from the checkout or the release."""
    if not (checkout / "pyproject.toml").is_file():
        return f"run pip install './sightline_serving-{__version__}-py3-none-any.whl[{extras}]'"
    return f"run pip install '.[{extras}]' in {checkout}"
