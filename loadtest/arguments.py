"""Options of `sightline load`."""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path

import orjson

from sightline.loadtest.client import Client
from sightline.loadtest.load import Load
from sightline.loadtest.report import TIMES
from sightline.loadtest.targets import TARGETS, Options, Prompt

DEFAULT_DURATION_S = 10.0
TIMEOUT_S = 60.0  # twice the default request timeout of the service, which should have responded by then
PROMPTS = Path(__file__).with_name("sentences.txt")
MAX_RATES = 100
UNITS_S = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}


def duration(text: str) -> float:
    """Parse a duration such as `10s`, `500ms`, `2m` or `10`, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a duration such as 500ms, 10s or 2m, got {text!r}")
    return float(match[1]) * UNITS_S[match[2] or "s"]


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def positive_rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a finite number greater than 0, got {text}")
    return value


def rates(text: str) -> list[float]:
    """Parse rates such as `10,20,40`, or `10:50:10` for 10, 20, 30, 40 and 50."""
    try:
        parts = [positive_rate(part) for part in re.split("[,:]", text)]
    except ValueError:
        parts = []
    if "," not in text and len(parts) == 3:
        first, last, step = parts
        parts = [first + step * index for index in range(min(int((last - first) / step + 1e-9) + 1, MAX_RATES + 1))]
    elif ":" in text or not parts:
        raise argparse.ArgumentTypeError(f"must be rates such as 10,20,40 or FIRST:LAST:STEP, got {text!r}")
    if not 1 <= len(parts) <= MAX_RATES:
        raise argparse.ArgumentTypeError(f"must have 1 to {MAX_RATES} rates, got {text!r}")
    return parts


def objective(text: str) -> tuple[str, float]:
    """Parse an objective such as `ttft=200ms`."""
    name, _, limit = text.partition("=")
    if name not in TIMES:
        raise argparse.ArgumentTypeError(f"must be NAME=DURATION with a NAME of {', '.join(TIMES)}, got {text!r}")
    return name, duration(limit)


def share(text: str) -> float:
    """Parse a share such as `5%` or `0.05`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(%)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be a share such as 5% or 0.05, got {text!r}")
    return float(match[1]) / (100 if match[2] else 1)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.description = "Load a running service over HTTP and measure its latency, throughput and goodput."
    parser.epilog = (
        "Rejections (503 and 429) are counted, but are no failures. `sightline load compare --help` describes\n"
        "the comparison of two runs. Exit status 4: the load test itself was too slow; 5: a figure became\n"
        "worse during a --soak.\n\nexample: %(prog)s --url http://127.0.0.1:8000 --clients 16 --duration 10s"
    )
    requests = parser.add_argument_group("requests")
    requests.add_argument("--url", default="http://127.0.0.1:8000", help="URL of the service (default: %(default)s)")
    requests.add_argument(
        "--endpoint",
        choices=TARGETS,
        default="generate",
        metavar="NAME",
        help=f"endpoint to call: {', '.join(TARGETS)} (default: %(default)s)",
    )
    requests.add_argument(
        "--model", metavar="NAME", help="model to call (default: the service's; needed by OpenAI, OIP)"
    )
    requests.add_argument("--stream", action="store_true", help="request streamed responses, to measure tokens")
    requests.add_argument("--max-new-tokens", type=positive, metavar="N", help="largest number of generated tokens")
    requests.add_argument(
        "--prompts",
        type=Path,
        default=PROMPTS,
        metavar="FILE",
        help="file with one prompt per line; in a .jsonl file, each line is a JSON string or the list of messages of a "
        "chat (default: 300 sentences)",
    )
    requests.add_argument("--key-file", type=Path, metavar="FILE", help="file with the API key to send; never recorded")
    profile = parser.add_argument_group("profile of the load")
    loop = profile.add_mutually_exclusive_group()
    loop.add_argument(
        "--clients",
        type=positive,
        default=16,
        metavar="N",
        help="closed loop: clients that wait for each response (default: %(default)s)",
    )
    loop.add_argument("--rate", type=positive_rate, metavar="R", help="open loop: requests per second, at random times")
    loop.add_argument(
        "--rates",
        type=rates,
        metavar="LIST",
        help="sweep: open loops with these rates (10,20,40 or FIRST:LAST:STEP), until the goodput falls",
    )
    loop.add_argument(
        "--steps", type=rates, metavar="LIST", help="step profile: these rates without pauses, like 10,50,10"
    )
    profile.add_argument("--soak", action="store_true", help="compare the first and last tenth of a long run at --rate")
    profile.add_argument(
        "--duration", type=duration, metavar="TIME", help="duration of the measurement, or of each rate (default: 10s)"
    )
    profile.add_argument("--requests", type=positive, metavar="N", help="end after N requests")
    profile.add_argument(
        "--warm-up",
        type=duration,
        default=1.0,
        metavar="TIME",
        help="duration of the load before the measurement (default: 1s)",
    )
    profile.add_argument(
        "--retry", action="store_true", help="after a 503 or 429, wait for Retry-After and repeat the request"
    )
    results = parser.add_argument_group("results")
    results.add_argument(
        "--objective",
        type=objective,
        action="append",
        default=[],
        metavar="NAME=TIME",
        help="largest time of a good request, such as ttft=200ms; repeat for several. Names: "
        + ", ".join(f"{name} ({title})" for name, (title, _) in TIMES.items()),
    )
    results.add_argument(
        "--max-lag",
        type=duration,
        default=0.05,
        metavar="TIME",
        help="largest 99th percentile of the load test's own delay; beyond it, the run is invalid (default: 50ms)",
    )
    results.add_argument(
        "--json", type=Path, metavar="FILE", help="write arguments, versions, figures and requests to FILE"
    )
    results.add_argument("--report", type=Path, metavar="FILE", help="write an HTML page with plots to FILE")
    add_threshold(results, "of --soak")


def add_threshold(parser: argparse._ActionsContainer, place: str) -> None:
    parser.add_argument(
        "--threshold",
        type=share,
        default=0.05,
        metavar="SHARE",
        help=f"largest change for the worse {place} (default: 5%%)",
    )


def parse_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options with the client and the load, or end the program with an error."""
    _add_options(parser)
    options = parser.parse_args(arguments)
    target = TARGETS[options.endpoint]
    options.objectives = dict(options.objective)
    if options.stream and target.stream_path is None:
        able = ", ".join(name for name, one in TARGETS.items() if one.stream_path)
        parser.error(f"--stream needs --endpoint {able}")
    if options.max_new_tokens is not None and not target.generates:
        able = ", ".join(name for name, one in TARGETS.items() if one.generates)
        parser.error(f"--max-new-tokens needs --endpoint {able}")
    if options.model is None and target.needs_model:
        parser.error(f"--endpoint {options.endpoint} needs --model")
    if options.objectives.keys() - {"latency"} and not options.stream:
        parser.error("--objective: only latency can be measured without --stream")
    open_rates = [options.rate] if options.rate else options.rates or options.steps or []
    if open_rates and options.retry:
        parser.error("--retry needs a closed loop; remove --rate, --rates or --steps")
    if (options.rates or options.steps) and options.requests is not None:
        parser.error("--requests needs --clients or --rate; use --duration")
    if options.soak and (options.rate is None or options.requests is not None):
        parser.error("--soak needs --rate and --duration")
    if options.duration is None and (options.requests is None or options.rates or options.steps):
        options.duration = DEFAULT_DURATION_S
    for name in ("json", "report"):
        path = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            parser.error(f"--{name}: the folder {path.parent} does not exist; create it")
    try:
        prompts = read_prompts(options.prompts)
    except (OSError, ValueError) as error:
        parser.error(f"--prompts: {error}")
    if not prompts:
        parser.error(f"--prompts: {options.prompts} has no prompts; expected one prompt per line")
    if not target.reads_chats and not all(isinstance(prompt, str) for prompt in prompts):
        parser.error("--prompts: messages of a chat need --endpoint openai-chat")
    try:
        key = options.key_file.read_text(encoding="ascii").strip() if options.key_file else ""
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"--key-file: {error}")
    if len(key.split()) > 1:
        parser.error(f"--key-file: {options.key_file} must have one key and nothing else")
    try:
        options.client = Client(options.url, TIMEOUT_S, key=key)
    except ValueError as error:
        parser.error(f"--url: {error}")
    of_requests = Options(options.model, options.stream, options.max_new_tokens)
    options.load = Load(
        path=target.path_for(of_requests),
        bodies=[target.body(prompt, of_requests) for prompt in prompts],
        is_streamed=options.stream,
        clients=options.clients,
        rates=open_rates,
        duration_s=math.inf if options.duration is None else options.duration,
        requests=options.requests,
        honors_retry_after=options.retry,
        has_usage=target.reports_usage,
    )
    return options


def read_prompts(path: Path) -> list[Prompt]:
    """Read the lines of a file that are not blank.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line of a `.jsonl` file is not a string or a list of messages.
    """
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
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
