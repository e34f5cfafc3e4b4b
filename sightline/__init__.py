"""Serves trained attention models, and shows what they attend to.

`sightline.connect(url)` is a client of a running service. `sightline.load(folder)` runs bundles in
this process, with the same interface.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sightline.client.clients import AsyncClient, Client, connect, load
    from sightline.client.transport import SightlineError

__version__ = "0.4.0"
__all__ = ["AsyncClient", "Client", "SightlineError", "connect", "load"]


def __getattr__(name: str) -> Any:
    """Load the client when it is used, so that `import sightline` loads nothing else."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "transport" if name == "SightlineError" else "clients"
    return getattr(import_module(f"sightline.client.{module}"), name)
