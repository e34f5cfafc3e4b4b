"""The settings of the process: `SIGHTLINE_*` variables and flags of the same names, read once and
frozen.
"""

import argparse
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, model_validator

from sightline.base.errors import UsageError
from sightline.service.fields import MAX_INPUTS, reworded

ENV_PREFIX = "SIGHTLINE_"
# Compatibility APIs, with the modules of service/compat/ that have their endpoints.
COMPATIBLE_APIS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "openai": ("openai",),
        "open-inference": ("open_inference",),
        "tgi": ("tgi", "huggingface"),
        "tei": ("tei", "huggingface"),
        "libretranslate": ("libretranslate",),
        "ollama": ("ollama",),
    }
)

MAX_WORKERS = 256
MAX_PORT = 65_535
ALL_MODELS = "*"  # value of `lazy_models`

# An origin as browsers send it: of any scheme, because extensions have their own, and without the
# default port. Pages from files and frames without an origin send `null`.
ORIGIN = re.compile(
    r"null|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.ASCII
)


class SettingsError(UsageError):
    """Invalid settings; the message names each and gives the reason."""


class Settings(BaseModel):
    """Settings of the service. `docs/reference/settings.md` repeats each description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 listens on all interfaces.")
    allowed_hosts: str | None = Field(
        default=None,
        description="Host names of the service, comma-separated; requests whose header Host has another name get 421. "
        "`*.example.org` stands for all names that end so, `*` for any. If not set, a service that listens on a "
        "loopback address answers only localhost and loopback addresses, so that no web page can reach it by a name "
        "of its own (DNS rebinding), and others answer any host.",
    )
    keys: Path | None = Field(
        default=None,
        description="File of API keys, written by `sightline keys add` and read again when it changes. If set, every "
        "request needs a key, except health checks; `/metrics` and model control need one with the role admin.",
    )
    quota_storage: SecretStr | None = Field(
        default=None,
        description="URL of a Redis or Valkey that counts the requests and tokens of keys with a quota, such as "
        "redis://localhost:6379/0, so that several services share the counts; needs the extra `redis`. If not set, "
        "each service counts in memory.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector that receives a trace of each sampled call by OTLP over HTTP, "
        "such as http://127.0.0.1:4318; needs the extra `traces`. If not set, there are no traces.",
    )
    trace_sampling: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="Fraction of the calls that are traced. A client that sends `traceparent` decides for its calls.",
    )
    port: int = Field(
        default=8000, ge=0, le=MAX_PORT, description="Port to listen on; 0 takes a free port and logs it."
    )
    admin_address: str | None = Field(
        default=None,
        description="Second address to listen on, such as 127.0.0.1:9000 or [::1]:9000. If set, `/metrics` and model "
        "control are served only there, beside the health checks, and everything else only on `port`.",
    )
    workers: str = Field(
        default="auto",
        coerce_numbers_to_str=True,
        description="Worker processes that serve the port together: a number from 1 to 256, or auto for one for each "
        "core that the process may use, if the memory suffices; 1 on a GPU. The limits hold for all workers "
        "together: each has an equal share of `max_rows`, `max_state_bytes`, `max_prefix_cache_bytes`, "
        "`max_waiting_*` and `max_response_bytes`.",
    )
    bundles: Path = Field(
        default=Path("bundles"),
        description="Folder of the bundles to serve, one subfolder each; hidden subfolders are ignored.",
    )
    default_model: str | None = Field(
        default=None,
        description="Models of requests that name no model, comma-separated: the first of them that can do the task. "
        "For other tasks, and if not set, it is the only model that can do the task; if several can, requests must "
        "name one.",
    )
    strict_loading: bool = Field(
        default=False,
        description="Exit with code 3 if any bundle fails to load; otherwise serve the others and log an error.",
    )
    lazy_models: str = Field(
        default="",
        description="Models to load on their first use instead of at start: names, comma-separated, or `*` for all. "
        "Bundles whose manifest has `lazy` are loaded so, too.",
    )
    load_timeout_s: float = Field(
        default=600.0,
        gt=0,
        description="Maximum seconds of each of the two stages of the load of a bundle: reading it, and running its "
        "graphs. A bundle that takes longer is not served.",
    )
    model_control: Literal["none", "explicit"] = Field(
        default="none",
        description="explicit allows clients to load and unload models of the bundles folder by name with POST "
        "/v2/repository/models/{model_name}/load and unload; none rejects these requests with 403. Without `keys`, let "
        "a proxy restrict these paths.",
    )
    provider: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="Device that runs the graphs; auto uses CUDA for float16 bundles if available, otherwise the CPU.",
    )
    compatible_apis: str = Field(
        default=",".join(COMPATIBLE_APIS),
        description="Compatibility APIs to serve, comma-separated; all others are disabled.",
    )
    cors_origins: str | None = Field(
        default=None,
        description="Origins of web pages that may call the service, comma-separated, such as https://example.org; "
        "`null` allows pages from files, `*` any origin.",
    )
    page: bool = Field(
        default=True, description="Serve the page that shows attention at / to browsers; false serves the API only."
    )
    frame_ancestors: str | None = Field(
        default=None,
        description="Origins of web pages that may show the page in a frame, comma-separated, such as "
        "https://example.org; `*` allows any.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads for each graph; with 0, each of several workers uses one, or more while the others are "
        "idle, and large models are measured at start. The container's CPU quota or the number of cores is the limit.",
    )
    max_rows: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Rows that one model decodes at once: one for each sequence, `num_beams` for a beam search; 0 "
        "derives the number from `max_state_bytes`, between 8 and 32 (on CUDA 128).",
    )
    max_state_bytes: int = Field(
        default=0,
        ge=0,
        description="Maximum bytes of the decoder state of all models; 0 uses half of the memory available to the "
        "process. It has no effect if `max_rows` is set.",
    )
    max_prefix_cache_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Maximum bytes of the prefix cache of all models; 0 disables it. It keeps the states of prompts of "
        "decoder-only models, which are not computed again for prompts that begin alike. If not set, it is an eighth "
        "of the memory available to the process, at most 1 GiB.",
    )
    max_batch_tokens: int = Field(
        default=1024, ge=1, description="Maximum tokens of an encoder batch, padding included."
    )
    max_inputs: int = Field(
        default=MAX_INPUTS,
        ge=1,
        le=MAX_INPUTS,
        description="Maximum inputs of a call, and samples of all its inputs; more get 422. A text that is split into "
        "sentences is one input.",
    )
    max_waiting_sequences: int = Field(
        default=256,
        ge=1,
        description="Maximum sequences that wait for one model, in addition to those in its rows; more get 429. A call "
        "enters a quarter of them at a time, at least 32; its other sequences follow as these finish. A call that "
        "enters n sequences needs 2n - 1 free places unless it is alone.",
    )
    max_waiting_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=1,
        description="Maximum bytes of request bodies that one model holds, and of all bodies that are arriving.",
    )
    max_waiting_tokens: int = Field(
        default=65536,
        ge=1,
        description="Maximum source tokens of one model's calls, waiting and running; more get 429.",
    )
    max_response_bytes: int = Field(
        default=0,
        ge=0,
        description="Maximum bytes of all responses until their clients have read them; 0 uses an eighth of the memory "
        "available to the process, between 32 MiB and 1 GiB.",
    )
    queue_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Maximum expected queue time in seconds. A call that would wait longer gets 429 immediately.",
    )
    request_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Maximum seconds of a request; the header X-Request-Timeout-Ms can only shorten it.",
    )
    max_body_bytes: int = Field(
        default=1024 * 1024, ge=1, description="Maximum bytes of a request body, after decompression."
    )
    max_connections: int = Field(
        default=2048, ge=1, description="Maximum open connections; more are answered with 429 and closed."
    )
    max_connections_per_address: int = Field(
        default=1024,
        ge=1,
        description="Maximum open connections of one IPv4 address or IPv6 network of 64 bits; a proxy counts as one "
        "address.",
    )
    header_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds within which a client must send the head of a request."
    )
    body_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds within which a client must send the body of a request."
    )
    write_timeout_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds for which a client may read nothing of its response; then the connection is closed.",
    )
    keep_alive_s: int = Field(
        default=5,
        ge=1,
        description="Seconds that an idle connection stays open; with a proxy, set more than its own idle timeout.",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        description="Seconds after SIGTERM during which /health/ready returns 503 draining and requests are still "
        "served.",
    )
    shutdown_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds after the drain window within which running requests must finish."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Minimum level of log lines; requests are logged as info, health checks as debug."
    )
    log_format: Literal["auto", "text", "json"] = Field(
        default="auto",
        description="Format of log lines; auto writes readable text to a terminal and JSON to anything else. NO_COLOR "
        "disables colors.",
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
        return _split(self.default_model or "")

    @property
    def lazy_model_names(self) -> tuple[str, ...]:
        return _split(self.lazy_models)

    def is_lazy(self, model: str) -> bool:
        """Return True if the model with this name is loaded on its first use."""
        return ALL_MODELS in self.lazy_model_names or model in self.lazy_model_names

    @property
    def limits(self) -> dict[str, float]:
        """All settings named `max_*`; `/metrics` exports them as gauges."""
        return {name: value for name, value in self if name.startswith("max_") and value is not None}

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return _split(self.cors_origins or "")

    @property
    def allowed_host_names(self) -> tuple[str, ...]:
        """Names and patterns for `AllowedHosts`; none for any host."""
        if self.allowed_hosts is not None:
            return tuple(name.lower() for name in _split(self.allowed_hosts))
        return ("localhost",) if is_loopback(self.host) else ("*",)

    @property
    def allowed_frames(self) -> tuple[str, ...]:
        return _split(self.frame_ancestors or "")

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.queue_timeout_s > self.request_timeout_s:
            raise ValueError(
                f"{env_name('queue_timeout_s')} ({self.queue_timeout_s:g}) exceeds {env_name('request_timeout_s')} "
                f"({self.request_timeout_s:g}): "
                "no request could wait that long; lower the first or raise the second"
            )
        if self.max_body_bytes > self.max_waiting_bytes:
            raise ValueError(
                f"{env_name('max_body_bytes')} ({self.max_body_bytes}) exceeds {env_name('max_waiting_bytes')} "
                f"({self.max_waiting_bytes}): "
                "the largest body could never wait; lower the first or raise the second"
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
        for name, origin in [
            *(("cors_origins", origin) for origin in self.allowed_origins),
            *(("frame_ancestors", origin) for origin in self.allowed_frames),
        ]:
            if origin != "*" and (not ORIGIN.fullmatch(origin) or (name, origin) == ("frame_ancestors", "null")):
                raise ValueError(
                    f"{name}: {origin!r} is not an origin as browsers send it, such as https://example.org or "
                    "http://localhost:8080: without a path, capital letters or the default port of the scheme"
                )
        return self


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
    return ENV_PREFIX + field.upper()


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def read_settings(
    arguments: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    parser: argparse.ArgumentParser | None = None,
    options: argparse.Namespace | None = None,
) -> Settings:
    """Read settings from flags, then environment variables, then defaults.

    Args:
        arguments: flags of the command line.
        environment: environment variables.
        parser: parser that gets the flags; by default that of `python -m sightline.service`.
        options: gets the values of all flags of the parser, also of those that are no settings.

    Raises:
        SettingsError: an environment variable `SIGHTLINE_*` is unknown, or a value is invalid.
        SystemExit: a flag is unknown, or `--help` was given; argparse has printed why.
    """
    parser = parser or argparse.ArgumentParser(prog="python -m sightline.service", allow_abbrev=False)
    parser.description = (
        "Serve the bundles of a folder over HTTP. Each flag is also an environment variable: "
        f"--max-rows is {env_name('max_rows')}."
    )
    parser.epilog = "example: %(prog)s --bundles bundles --port 8000"
    add_flags(parser, Settings.model_fields)
    flags = vars(parser.parse_args(arguments, options))
    return make_settings({name: flags[name] for name in Settings.model_fields}, environment)


def make_settings(flags: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings of flags by field name, then of environment variables, then the defaults.

    A flag that is None is absent.

    Raises:
        SettingsError: an environment variable `SIGHTLINE_*` is unknown, or a value is invalid.
    """
    known = {env_name(field) for field in Settings.model_fields}
    unknown = sorted(key for key in environment if key.upper().startswith(ENV_PREFIX) and key not in known)
    if unknown:
        raise SettingsError(f"unknown setting: {', '.join(unknown)}; docs/reference/settings.md lists all settings")
    values = {field: environment[env_name(field)] for field in Settings.model_fields if env_name(field) in environment}
    values |= {field: value for field, value in flags.items() if value is not None}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = [_describe(part["loc"], part["msg"], part["input"]) for part in error.errors()]
        raise SettingsError("; ".join(problems)) from None


def add_flags(parser: argparse.ArgumentParser, fields: Iterable[str]) -> None:
    """Add the flags of these settings to a parser."""
    for name in fields:
        field = Settings.model_fields[name]
        default = "" if field.default is None else f" Default: {field.default}"
        parser.add_argument(flag_name(name), dest=name, metavar="VALUE", help=f"{field.description}{default}")


def _describe(location: tuple[int | str, ...], message: str, value: Any) -> str:
    if location:
        name = f"{env_name(str(location[0]))} ({flag_name(str(location[0]))})"
        if not message.startswith("Value error, "):
            return f"{name} {reworded(message).partition(', unable to')[0].removeprefix('It ')}, got {value!r}"
        return f"{name}: {message.removeprefix('Value error, ')}"
    message = message.removeprefix("Value error, ")
    # Errors of several settings begin with the name of one: give its variable and its flag, too.
    name, _, rest = message.partition(":")
    return f"{env_name(name)} ({flag_name(name)}):{rest}" if name in Settings.model_fields else message
