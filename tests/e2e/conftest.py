from collections.abc import Iterator
from pathlib import Path

import pytest

from lab.bench.server import RunningServer, serving


@pytest.fixture(scope="session")
def shipped() -> Iterator[RunningServer]:
    """The service as `make serve` starts it, over the bundles of the repository."""
    with serving(Path("bundles"), default_model="multi30k-en-de") as server:
        yield server
