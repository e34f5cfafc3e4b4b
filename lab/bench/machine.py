"""Describe the machine, package versions and commit that a result was measured with."""

import argparse
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lab.bench.commit import DirtyTreeError, commit_facts

WIDEST = {"avx512f": "AVX-512", "avx2": "AVX2"}
PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "ctranslate2",
    "transformers",
    "torch",
    "fastapi",
    "uvicorn",
    "numpy",
    "tokenizers",
)


def processor_name() -> str:
    """Return the name of the processor, with its widest vector instructions if Linux has them."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}
    name = facts.get("model name") or platform.processor() or platform.machine()
    widest = next((label for flag, label in WIDEST.items() if flag in facts.get("flags", "").split()), None)
    return f"{name} with {widest}" if widest else name


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def add_allow_dirty(parser: argparse.ArgumentParser) -> None:
    """Add the flag that allows a measurement with uncommitted changes."""
    text = "measure with uncommitted changes; the result lists the changed files"
    parser.add_argument("--allow-dirty", action="store_true", help=text)


def describe_or_exit(allow_dirty: bool) -> dict[str, Any]:
    """Describe the machine; for uncommitted changes, print the reason and exit with status 2."""
    try:
        return describe(allow_dirty)
    except DirtyTreeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def describe(allow_dirty: bool) -> dict[str, Any]:
    """Return the facts that are recorded with a result. Call it before measuring, because the tree
    may change during a long run. Raises as `commit_facts` does.
    """
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": installed(),
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **commit_facts(allow_dirty),
    }
