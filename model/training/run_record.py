"""Record of a run: data, versions, commands, times and results, in `record.json`.

Settings and the configuration of the model are in files of their own, see
`sightline.model.training.folder`.
"""

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sightline.model.checkpoint import replace_text
from sightline.model.config_fields import read_fields, to_json

PACKAGES = {"sightline": "sightline-serving", "torch": "torch", "tokenizers": "tokenizers", "numpy": "numpy"}
# Fields of earlier versions, which are now in other files of the run, or among the metrics.
MOVED = ("model", "training", "config", "options", "seed", "signature")
CHECKOUT = Path(__file__).resolve().parents[2]


class TrainingRecord:
    """The record of a run, with one entry of `starts` for each start or resume."""

    def __init__(self, path: Path) -> None:
        """Read a record, or create an empty one. Raises `ValueError` if it is not valid JSON."""
        self._path = path
        self._fields: dict[str, Any] = read_fields(path) if path.exists() else {"starts": []}

    @property
    def last_start(self) -> Mapping[str, Any] | None:
        """Facts of the last start, if there was one."""
        starts = self._fields.get("starts")
        return starts[-1] if starts else None

    def start(self, facts: Mapping[str, Any], start: Mapping[str, Any]) -> None:
        """Write facts of the whole run, which replace earlier ones, and an entry for this start
        with its time and command.
        """
        entry = {"time": _now(), "command": shlex.join(sys.orig_argv), **start}
        kept = {name: value for name, value in self._fields.items() if name not in MOVED}
        self._fields = {**kept, **facts, "starts": [*self._fields.get("starts", []), entry]}
        self._write()

    def end(self, reason: str, result: Mapping[str, Any], metrics: Mapping[str, Any]) -> None:
        """Write why and when the training ended, its result so far, and the last metrics of dev."""
        self._fields["starts"][-1] |= {"end_time": _now(), "end": reason}
        self._fields["result"] = dict(result)
        if metrics:
            # Metrics of test are those of earlier weights.
            self._fields["metrics"] = {"dev": dict(metrics)}
        self._write()

    def _write(self) -> None:
        replace_text(self._path, to_json(self._fields))


def environment(device: torch.device) -> dict[str, Any]:
    """Return the facts on which the bits of the weights depend, and the commit of the code."""
    return {
        "versions": {"python": sys.version.split()[0], **{key: _version(package) for key, package in PACKAGES.items()}},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "commit": _commit(),
    }


def differences(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return descriptions of the differences between two environments that change the bits."""
    pairs = [(f"{name} {{}}", earlier.get(name), now[name]) for name in ("threads", "device")]
    pairs.append(("PyTorch {}", earlier.get("versions", {}).get("torch"), now["versions"]["torch"]))
    return [
        f"{form.format(after)} instead of {before}"
        for form, before, after in pairs
        if before is not None and before != after
    ]


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Return the commit of the code, `-dirty` if files are changed; None without a checkout."""
    git = shutil.which("git")
    if git is None or not (CHECKOUT / ".git").exists():
        return None
    describe = [git, "-C", str(CHECKOUT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    response = subprocess.run(describe, capture_output=True, text=True, check=False)  # noqa: S603 - constant arguments
    return response.stdout.strip() or None
