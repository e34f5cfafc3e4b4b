"""Tables of cases beside tests: NAME.yaml for test NAME.py."""

from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]


@cache
def _read(path: Path) -> Any:
    return yaml.load(path.read_bytes(), yaml.CSafeLoader)


def read_table(module: str, name: str = "") -> Any:
    """Return the table beside a module, or the one of this name."""
    tables = _read(Path(module).with_suffix(".yaml"))
    return tables[name] if name else tables
