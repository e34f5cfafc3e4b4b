"""The settings of the process: `SIGHTLINE_*` variables and flags of the same names, read once and frozen."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

ENV_PREFIX = "SIGHTLINE_"
# Compatibility APIs; service/compat/ has a module or a package for each.
FAMILIES = ("openai", "open-inference", "tgi", "tei", "libretranslate")

# As browsers write one: of any scheme, since extensions have their own, and never with the port that it implies. Files,
# and frames without an origin, send `null`.
ORIGIN = re.compile(
    r"null|(?!http://.*:80$|https://.*:443$)[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:]+\])(:\d{1,5})?", re.ASCII
)


class SettingsError(Exception):
    """Settings that cannot be used; the message names each and says why."""


class Settings(BaseModel):
    """How the service runs. `docs/settings.md` repeats each description."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    host: str = Field(default="127.0.0.1", description="Address to listen on; 0.0.0.0 is every interface.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one and logs it.")
    bundles: Path = Field(
        default=Path("bundles"),
        description="Folder whose subfolders are the bundles to serve; hidden ones are ignored.",
    )
    default_model: str | None = Field(
        default=None, description="Model of requests that name none; without it the first bundle by name."
    )
    provider: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="What runs the graphs; auto takes CUDA for float16 bundles where it works, the CPU otherwise.",
    )
    families: str = Field(
        default=",".join(FAMILIES),
        description="Families of routes for clients of other services, commas between them; the rest is off.",
    )
    cors_origins: str | None = Field(
        default=None,
        description="Origins whose pages may call, commas between them, such as https://example.org; "
        "`null` is a page from a file, `*` is any.",
    )
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads that run each graph; 0 measures at start how many pay, up to the container's CPU quota or "
        "every core.",
    )
    max_rows: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Rows that one model decodes at once: one for each sequence, `num_beams` for a beam search; 0 "
        "takes as many as `max_state_bytes` allows, between 8 and 128.",
    )
    max_state_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes that the decoder state of all models may take together; 0 takes half of the memory that the "
        "process may use. It has no effect if `max_rows` is set.",
    )
    max_batch_tokens: int = Field(default=1024, ge=1, description="Largest encoder batch in tokens, padding included.")
    max_waiting_sequences: int = Field(
        default=256,
        ge=1,
        description="Sequences that may wait for one model, beside those in its rows; more are refused.",
    )
    max_waiting_bytes: int = Field(
        default=16 * 1024 * 1024,
        ge=1,
        description="Bytes of request bodies that one model may hold, and bytes of all bodies that are arriving.",
    )
    max_waiting_tokens: int = Field(
        default=65536,
        ge=1,
        description="Source tokens that one model may hold, running ones included; more are refused.",
    )
    max_response_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes that the responses in progress may take together until they are read; 0 takes an eighth of "
        "the memory that the process may use, between 32 MiB and 1 GiB.",
    )
    queue_timeout_s: float = Field(
        default=5.0,
        gt=0,
        description="Longest expected time in seconds that calls in progress may delay a new one; otherwise it is "
        "refused at once.",
    )
    request_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds that a request may take; X-Request-Timeout-Ms can only shorten it."
    )
    max_body_bytes: int = Field(
        default=1024 * 1024, ge=1, description="Largest request body in bytes, after decompression."
    )
    max_connections: int = Field(
        default=2048, ge=1, description="Connections that may be open at once; more are answered with 503 and closed."
    )
    max_connections_per_address: int = Field(
        default=1024,
        ge=1,
        description="Connections that one client address may have open; a proxy is one address.",
    )
    header_timeout_s: float = Field(
        default=5.0, gt=0, description="Seconds that a client has to send a request's head."
    )
    body_timeout_s: float = Field(default=10.0, gt=0, description="Seconds that a client has to send a request's body.")
    write_timeout_s: float = Field(
        default=10.0, gt=0, description="Seconds that a client may read nothing of an answer before it is cut off."
    )
    keep_alive_s: int = Field(
        default=5,
        ge=1,
        description="Seconds that an idle connection is kept; above a proxy's own idle time where one is used.",
    )
    drain_s: float = Field(
        default=5.0,
        ge=0,
        description="Seconds after SIGTERM during which new work is still answered, with 503 draining.",
    )
    shutdown_timeout_s: float = Field(
        default=30.0, gt=0, description="Seconds after the drain window that work in flight has to finish."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe level that is logged; requests are info, health checks debug."
    )

    @property
    def family_names(self) -> tuple[str, ...]:
        return _split(self.families)

    @property
    def limits(self) -> dict[str, float]:
        """All settings named `max_*`, which `/metrics` shows as gauges."""
        return {name: value for name, value in self if name.startswith("max_") and value is not None}

    @property
    def allowed_origins(self) -> tuple[str, ...]:
        return _split(self.cors_origins or "")

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.queue_timeout_s > self.request_timeout_s:
            raise ValueError(
                f"queue_timeout_s ({self.queue_timeout_s:g}) exceeds request_timeout_s ({self.request_timeout_s:g}): "
                "no request could wait so long; lower the first or raise the second"
            )
        if self.max_body_bytes > self.max_waiting_bytes:
            raise ValueError(
                f"max_body_bytes ({self.max_body_bytes}) exceeds max_waiting_bytes ({self.max_waiting_bytes}): "
                "the largest body could never wait; lower the first or raise the second"
            )
        for name in self.family_names:
            if name not in FAMILIES:
                raise ValueError(f"families: there is no family {name!r}; there are {', '.join(FAMILIES)}")
        for origin in self.allowed_origins:
            if origin != "*" and not ORIGIN.fullmatch(origin):
                raise ValueError(
                    f"cors_origins: {origin!r} is no origin as browsers send it, such as https://example.org or "
                    "http://localhost:8080: no path, no capital letters, no port that the scheme implies"
                )
        return self


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


def env_name(field: str) -> str:
    return ENV_PREFIX + field.upper()


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def read_settings(arguments: Sequence[str], environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings from flags, then environment variables, then defaults.

    Raises:
        SettingsError: an unknown `SIGHTLINE_*` variable, or a value that does not fit.
        SystemExit: an unknown flag, or `--help`; argparse has said so.
    """
    known = {env_name(field) for field in Settings.model_fields}
    unknown = sorted(key for key in environment if key.upper().startswith(ENV_PREFIX) and key not in known)
    if unknown:
        raise SettingsError(f"unknown setting: {', '.join(unknown)}; docs/settings.md has those that exist")
    values = {field: environment[env_name(field)] for field in Settings.model_fields if env_name(field) in environment}
    values |= {key: value for key, value in vars(_parser().parse_args(arguments)).items() if value is not None}
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        problems = [_describe(part["loc"], part["msg"]) for part in error.errors()]
        raise SettingsError("; ".join(problems)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m service",
        description="Serve the bundles of a folder over HTTP. Each flag is also an environment variable: "
        f"--max-rows is {env_name('max_rows')}.",
        allow_abbrev=False,
    )
    for name, field in Settings.model_fields.items():
        default = "" if field.default is None else f" Default: {field.default}"
        parser.add_argument(flag_name(name), dest=name, metavar="VALUE", help=f"{field.description}{default}")
    return parser


def _describe(location: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    return f"{env_name(str(location[0]))} ({flag_name(str(location[0]))}): {message}" if location else message
