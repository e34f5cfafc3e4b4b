"""Values of the options of `sightline load`: durations, rates, shares, objectives and prompts."""

import math
import re
from pathlib import Path

import orjson

from sightline.loadtest.load_report import TIMES
from sightline.loadtest.targets import Prompt

MAX_RATES = 100
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Parse a duration such as `10s`, `500ms`, `2m` or `10`, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None:
        raise ValueError(f"must be a duration such as 500ms, 10s or 2m, got {text!r}")
    return float(match[1]) * UNITS_S[match[2] or "s"]


def rates(text: str) -> list[float]:
    """Parse rates such as `10,20,40`, or `10:50:10` for 10, 20, 30, 40 and 50."""
    try:
        parts = [float(part) for part in re.split("[,:]", text)]
    except ValueError:
        parts = []
    for part in parts:
        if not 0 < part < math.inf:
            raise ValueError(f"must be rates greater than 0, got {part:g}")
    if "," not in text and len(parts) == 3:
        first, last, step = parts
        parts = [first + step * index for index in range(min(int((last - first) / step + 1e-9) + 1, MAX_RATES + 1))]
    elif ":" in text or not parts:
        raise ValueError(f"must be rates such as 10,20,40 or FIRST:LAST:STEP, got {text!r}")
    if not 1 <= len(parts) <= MAX_RATES:
        raise ValueError(f"must have 1 to {MAX_RATES} rates, got {text!r}")
    return parts


def objective(text: str) -> tuple[str, float]:
    """Parse an objective such as `ttft=200ms`."""
    name, _, limit = text.partition("=")
    if name not in TIMES:
        raise ValueError(f"must be NAME=DURATION with a NAME of {', '.join(TIMES)}, got {text!r}")
    return name, duration(limit)


def share(text: str) -> float:
    """Parse a share such as `5%` or `0.05`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%)?", text)
    if match is None:
        raise ValueError(f"must be a share such as 5% or 0.05, got {text!r}")
    return float(match[1]) / (100 if match[2] else 1)


def read_prompts(path: Path) -> list[Prompt]:
    """Read the lines of a file that are not blank; a line ends with LF, optionally after CR.

    Raises `OSError`, or `ValueError` if a line of `.jsonl` is not a string or a list of messages.
    """
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        lines = [text for line in file if (text := line.removesuffix("\n").removesuffix("\r")).strip()]
    if path.suffix != ".jsonl":
        return list(lines)
    prompts: list[Prompt] = []
    for number, line in enumerate(lines, 1):
        try:
            prompt = orjson.loads(line)
        except ValueError:
            prompt = None
        is_chat = isinstance(prompt, list) and prompt and all(isinstance(message, dict) for message in prompt)
        if not isinstance(prompt, str) and not is_chat:
            raise ValueError(f"{path}, line {number} must be a JSON string or a list of messages")
        prompts.append(prompt)
    return prompts
