"""What a result was measured on."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from loadtest.commit import commit

PACKAGES = (
    "onnxruntime",
    "onnxruntime-gpu",
    "ctranslate2",
    "litserve",
    "transformers",
    "torch",
    "fastapi",
    "uvicorn",
    "numpy",
    "tokenizers",
)


def processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def installed(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    versions = {}
    for name in packages:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def describe() -> dict[str, Any]:
    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "packages": installed(),
        "commit": commit(),
    }
