"""`sightline keys`: add, list and remove the API keys of a file."""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

from annotated_types import Ge
from pydantic import model_validator

from sightline.base.options import Options, Shown, flag_name, parse_with
from sightline.base.parser import Parser
from sightline.service.keys import Quota, Role, add_key, read_keys, remove_key
from sightline.service.settings import Settings, make_settings

Limit = Annotated[int | None, Ge(1)]


class KeysOptions(Options):
    """Manage the API keys of a service: add, list or remove them.

    The file has only the hashes of the keys; `add` prints the new key, once. A running service
    reads a changed file within a second.
    """

    example = "add alice --keys keys.json"

    action: Annotated[Literal["add", "list", "remove"], Shown(is_positional=True)]
    """add a key, list the labels and roles, or remove a key"""
    label: Annotated[str | None, Shown(is_positional=True)] = None
    """name of the key in logs and metrics; not for list"""
    role: Role = "use"
    """admin may also read /metrics and load models"""
    requests_per_minute: Limit = None
    """quota of a new key: requests per minute (default: none)"""
    tokens_per_minute: Limit = None
    """quota of a new key: tokens per minute (default: none)"""
    concurrent_sequences: Limit = None
    """quota of a new key: concurrent sequences (default: none)"""

    @property
    def quota(self) -> dict[str, int]:
        return self.model_dump(include=set(Quota.model_fields), exclude_none=True)

    @model_validator(mode="after")
    def _check_action(self) -> Self:
        for name in self.quota if self.action != "add" else ():
            raise ValueError(f"{flag_name(name)} is only for add; edit the file to change a quota")
        if (self.label is None) != (self.action == "list"):
            raise ValueError(f"{self.action} needs {'no label' if self.label else 'a label'}")
        return self


def run(parser: Parser, words: Sequence[str]) -> int:
    """Run `sightline keys add`, `list` or `remove`, and return the exit code."""
    options, texts = parse_with(parser, words, KeysOptions, Settings, ["keys"])
    label, path = options.label or "", make_settings(texts).keys
    if path is None:
        parser.error("name the file of keys with --keys or SIGHTLINE_KEYS")
    if options.action == "add":
        print(add_key(path, label, options.role, Quota(**options.quota) if options.quota else None))
    elif options.action == "remove":
        remove_key(path, label)
    else:
        for key in read_keys(path):
            quota = {} if key.quota is None else key.quota.model_dump(exclude_none=True)
            print("  ".join([key.label, key.role, *(f"{name}={limit}" for name, limit in quota.items())]))
    return 0
