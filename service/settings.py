"""The frozen settings of the process: `SIGHTLINE_*` variables and flags of the same names."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, SecretStr, model_validator
from pydantic.fields import FieldInfo

from sightline.base.machine import usable_memory
from sightline.base.options import Options, Shown, add_options, check, fields_of, flag_name, given_variables
from sightline.base.parser import Parser
from sightline.service.body_fields import MAX_INPUTS
from sightline.service.discovery import read_default_models

# Compatibility APIs, with the modules of service/compat/ that have their endpoints.
COMPATIBLE_APIS: Mapping[str, Sequence[str]] = {
    "openai": ("openai",),
    "open-inference": ("open_inference",),
    "tgi": ("tgi", "huggingface"),
    "tei": ("tei", "huggingface"),
    "libretranslate": ("libretranslate",),
    "deepl": ("deepl",),
    "google": ("google",),
    "mtranserver": ("mtranserver",),
    "ollama": ("ollama",),
}

MAX_WORKERS = 256
MAX_PORT = 65_535
TOKENS_PER_SEQUENCE = 256  # `max_waiting_tokens` for each of the `max_waiting_sequences`
ALL_MODELS = "*"  # value of `lazy_models`

# Settings that protect a service from its clients, for a process without clients.
NO_LIMITS: Mapping[str, float] = {
    "max_inputs": MAX_INPUTS,
    "queue_timeout_s": 1e9,
    "request_timeout_s": 1e9,
    "max_waiting_sequences": 1 << 40,
    "max_waiting_tokens": 1 << 40,
    "max_response_bytes": 1 << 50,
}

# An origin as browsers send it: of any scheme, because extensions have their own, and without the
# default port. Pages from files and frames without an origin send `null`.
ORIGIN = re.compile(
    r"null|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.ASCII
)


def _memory(values: Mapping[str, Any]) -> int:
    return values["memory_bytes"] or usable_memory()


class Settings(Options):
    """Serve the bundles of a folder over HTTP.

    Each flag is also an environment variable: --max-rows is SIGHTLINE_MAX_ROWS.
    """

    prefix = "SIGHTLINE_"
    example = "--bundles bundles --port 8000"

    host: str = "127.0.0.1"
    """Address to listen on; ::, all interfaces with IPv6 and IPv4, lets other machines and
    containers reach the service, 0.0.0.0 with IPv4 only."""
    allowed_hosts: str | None = None
    """Host names of the service, comma-separated; requests with another header Host get 421, except
    health checks and `/metrics`. `*.example.org` stands for all names that end so, `*` for any. If
    not set, a service that listens on a loopback address answers only localhost and loopback
    addresses (DNS rebinding), and others answer any host."""
    keys: Annotated[Path | None, Shown("FILE")] = None
    """File of API keys, written by `sightline keys add` and read again when it changes. If set,
    every request needs a key, except health checks; `/metrics` and model control need one with the
    role admin."""
    quota_storage: Annotated[SecretStr | None, Shown("URL")] = None
    """URL of a Redis or Valkey, such as redis://localhost:6379/0, in which several services count
    the requests and tokens of keys with a quota; needs the extra `redis`."""
    port: int = Field(default=8000, ge=0, le=MAX_PORT)
    """Port to listen on, if another program uses the default; 0 takes a free port and logs it."""
    admin_address: str | None = None
    """Second address to listen on, such as 127.0.0.1:9000 or [::1]:9000. If set, `/metrics` and
    model control are served only there, beside the health checks, and everything else only on
    `port`."""
    workers: str = Field(default="auto", coerce_numbers_to_str=True)
    """Worker processes that serve the port together: a number from 1 to 256, or auto for one for
    each core that the process may use, if the memory suffices; 1 on a GPU. Each has an equal share
    of `memory_bytes`, `max_rows` and `max_waiting_sequences`."""
    bundles: Annotated[Path, Shown("FOLDER")] = Path("bundles")
    """Folder of the bundles to serve, one subfolder each; hidden subfolders are ignored."""
    default_model: Annotated[str | None, Shown("MODELS")] = None
    """Models of requests that name no model, comma-separated: the first of them that can do the
    task, or else the only model of the service that can. If not set, those that `sightline models
    default` wrote to the folder of bundles."""
    glossaries: Annotated[Path | None, Shown("FOLDER")] = None
    """Folder in which clients store glossaries, each API key its own; workers and services can
    share it. If not set, terms come only with requests."""
    strict_loading: bool = False
    """Exit with code 3 if any bundle fails to load, so that a rollout stops; otherwise serve the
    others and log an error."""
    lazy_models: str = ""
    """Models to load on their first use instead of at start, which saves memory: names,
    comma-separated, or `*` for all. Bundles whose manifest has `lazy` are loaded so, too."""
    model_control: Literal["none", "explicit"] = "none"
    """explicit allows clients to load and unload models of the bundles folder by name with POST
    /v2/repository/models/{model_name}/load and unload; none rejects these requests with 403.
    Without `keys`, let a proxy restrict these paths."""
    provider: Literal["auto", "cpu", "cuda"] = "auto"
    """Device that runs the graphs; auto uses CUDA for float16 bundles if available, otherwise the
    CPU. With cuda, which is experimental (not yet run on a GPU), a GPU must be available."""
    compatible_apis: str = ",".join(COMPATIBLE_APIS)
    """Compatibility APIs to serve, comma-separated; all others are disabled, so that clients reach
    only what is used."""
    cors_origins: str | None = None
    """Origins of web pages that may call the service and show its page in a frame,
    comma-separated, such as https://example.org; `*` allows any origin, and `null` pages from
    files to call it."""
    page: bool = True
    """Serve the page at / to browsers; without it, only the API is served."""
    threads: int = Field(default=0, ge=0, le=1024)
    """Threads for each graph, at most the container's CPU quota or the number of cores; with 0,
    each of several workers uses one, or more while the others are idle, and large models are
    measured at start."""
    memory_bytes: int = Field(default=0, ge=0)
    """Memory of the service, if it shares a machine with other programs; 0 uses all that is
    available to the process. Half is for decoder states, an eighth (at most 1 GiB) for the prefix
    cache, and an eighth (32 MiB to 1 GiB) for responses until their clients have read them."""
    prefix_cache: bool = True
    """Keep the states of prompts of decoder-only models for prompts that begin alike. Without keys,
    callers can learn each other's prompts by the time to the first token."""
    max_rows: int = Field(default=0, ge=0, le=1024)
    """Sequences that one model decodes at once, each in a slot (row), a beam search in `num_beams`
    slots; 0 derives 8 to 32 (on CUDA 128) from `memory_bytes`, or fewer if only these fit. More
    raise the throughput and the time of each token."""
    max_inputs: int = Field(default=MAX_INPUTS, ge=1, le=MAX_INPUTS)
    """Maximum inputs of a call, and samples of all its inputs; more get 422. A text that is split
    into sentences is one input."""
    max_waiting_sequences: int = Field(default=256, ge=1)
    """Maximum sequences that wait for one model, in addition to those in its slots; more get 429. A
    call enters a quarter of them at a time, at least 32, and needs 2n - 1 free places for n
    sequences unless it is alone. One API key holds at most half of all places, and without keys an
    address three quarters. Source tokens are limited to 256 times this number. Raise it if clients
    prefer waiting to 429, or come through one proxy."""
    queue_timeout_s: float = Field(default=5.0, gt=0)
    """Maximum expected queue time in seconds. A call that would wait longer gets 429 at once."""
    request_timeout_s: float = Field(default=30.0, gt=0)
    """Maximum seconds of a request, if long texts need more; the header X-Request-Timeout-Ms can
    only shorten it."""
    max_body_bytes: int = Field(default=1024 * 1024, ge=1)
    """Maximum bytes of a request body, after decompression. The bodies that a model's calls hold,
    and those that are arriving, may have 16 MiB together, or one such body if it is larger."""
    max_connections: int = Field(default=2048, ge=1)
    """Maximum open connections, half of them from one IPv4 address or IPv6 network of 64 bits;
    more are answered with 429 and closed. Raise it for many clients behind one proxy."""
    client_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds within which a client must send the head of a request, then its body, and for which
    it may read nothing of its response; then the connection is closed. Slow networks need more."""
    keep_alive_s: int = Field(default=5, ge=1)
    """Seconds that an idle connection stays open; with a proxy, set more than its own idle
    timeout."""
    drain_s: float = Field(default=5.0, ge=0)
    """Seconds after SIGTERM during which /health/ready returns 503 draining and requests are still
    served: the time that a load balancer needs to notice."""
    shutdown_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds after the drain window within which running requests must finish; long generations
    need more."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of log lines; requests are logged as info, health checks as debug. warning
    keeps the log small."""

    # Only code sets the fields below. Most are limits that follow from the settings above, for
    # tests, for the share of a worker, and for commands without clients.
    folder_default_models: tuple[str, ...] = ()  # those that the folder of bundles names
    only: tuple[str, ...] = ()  # subfolders of `bundles` to load at start; all if empty
    load_timeout_s: float = 600.0  # of each of the two stages of the load of a bundle
    max_batch_tokens: int = 1024  # of an encoder batch, padding included
    max_waiting_bytes: int = Field(default_factory=lambda values: max(16 << 20, values["max_body_bytes"]))
    max_waiting_tokens: int = Field(
        default_factory=lambda values: TOKENS_PER_SEQUENCE * values["max_waiting_sequences"]
    )
    max_connections_per_address: int = Field(default_factory=lambda values: -(-values["max_connections"] // 2))
    max_state_bytes: int = Field(default_factory=lambda values: _memory(values) // 2)
    max_response_bytes: int = Field(default_factory=lambda values: min(max(_memory(values) // 8, 32 << 20), 1 << 30))
    max_prefix_cache_bytes: int = Field(
        default_factory=lambda values: min(_memory(values) // 8, 1 << 30) if values["prefix_cache"] else 0
    )

    @property
    def quota_storage_url(self) -> str | None:
        return None if self.quota_storage is None else self.quota_storage.get_secret_value()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Hosts and ports to listen on: for clients, then for administrators if it is set."""
        return [(self.host, self.port), *([] if self.admin_address is None else [_split_address(self.admin_address)])]

    @property
    def admin_port(self) -> int | None:
        return None if self.admin_address is None else _split_address(self.admin_address)[1]

    @property
    def api_names(self) -> tuple[str, ...]:
        return _split(self.compatible_apis)

    @property
    def default_model_names(self) -> tuple[str, ...]:
        return self.folder_default_models if self.default_model is None else _split(self.default_model)

    @property
    def lazy_model_names(self) -> tuple[str, ...]:
        return _split(self.lazy_models)

    def is_lazy(self, model: str) -> bool:
        """Return True if the model with this name is loaded on its first use."""
        return ALL_MODELS in self.lazy_model_names or model in self.lazy_model_names

    @property
    def limits(self) -> dict[str, float]:
        """All limits named `max_*`; `/metrics` exports them as gauges."""
        return {name: value for name, value in self if name.startswith("max_")}

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return _split(self.cors_origins or "")

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        """Names and patterns for `host_check`; none for any host."""
        if self.allowed_hosts is not None:
            return tuple(name.lower() for name in _split(self.allowed_hosts))
        return ("localhost",) if is_loopback(self.host) else ("*",)

    @property
    def allowed_frames(self) -> tuple[str, ...]:
        return tuple(origin for origin in self.allowed_origins if origin != "null")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.queue_timeout_s > self.request_timeout_s:
            raise ValueError(
                f"{env_name('queue_timeout_s')} ({self.queue_timeout_s:g}) exceeds {env_name('request_timeout_s')} "
                f"({self.request_timeout_s:g}): "
                "no request could wait that long; lower the first or raise the second"
            )
        if self.workers != "auto" and not (self.workers.isdecimal() and 1 <= int(self.workers) <= MAX_WORKERS):
            raise ValueError(f"workers: it must be auto or a number from 1 to {MAX_WORKERS}, got {self.workers!r}")
        if self.admin_address is not None:
            host, port = _split_address(self.admin_address)
            if not host or not 1 <= port <= MAX_PORT or port == self.port:
                raise ValueError(
                    f"admin_address: it must be a host and a port other than that of the service, such as "
                    f"127.0.0.1:9000, got {self.admin_address!r}"
                )
        for name in self.api_names:
            if name not in COMPATIBLE_APIS:
                raise ValueError(f"compatible_apis: unknown API {name!r}; the APIs are {', '.join(COMPATIBLE_APIS)}")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: {origin!r} is not an origin as browsers send it, such as https://example.org or "
                    "http://localhost:8080: without a path, capital letters or the default port of the scheme"
                )
        return self


# The settings that a user can change; the other fields are limits that follow from them.
SETTINGS: Mapping[str, FieldInfo] = fields_of(Settings)


def is_loopback(host: str) -> bool:
    """Return True if a host is only reachable from its own machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _split_address(address: str) -> tuple[str, int]:
    """Return the host and the port of an address; the port is 0 if it is not a number."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port) if port.isdecimal() else 0


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def env_name(field: str) -> str:
    return Settings.prefix + field.upper()


def service_parser() -> Parser:
    return Parser(prog="python -m sightline.service", allow_abbrev=False)


def read_flags(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> dict[str, Any]:
    """Add the flags of the settings to a parser, and return the texts of all its flags by name."""
    add_options(parser, Settings)
    return vars(parser.parse_args(arguments))


def make_settings(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of flags by field name, then of environment variables, then the defaults.

    A flag that is None is absent. The folder of bundles may name default models. Raises
    `UsageError` if a variable `SIGHTLINE_*` is unknown or a value is invalid, and `BundleError` if
    the file of default models cannot be read.
    """
    flag_values = {
        name: (flag_name(name), value)
        for name, value in flags.items()
        if name in Settings.model_fields and value is not None
    }
    settings = check(Settings, given_variables(Settings, environment), flag_values)
    return settings.model_copy(update={"folder_default_models": read_default_models(settings.bundles)})
