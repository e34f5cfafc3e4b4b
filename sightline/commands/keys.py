"""`sightline keys`: add, list and remove the API keys of a file."""

import sys
from collections.abc import Sequence
from typing import get_args

from sightline.commands.parser import EXIT_FAILED, EXIT_USAGE, Parser
from sightline.service.keys import KeysError, Quota, Role, add_key, read_keys, remove_key
from sightline.service.settings import SettingsError, add_flags, flag_name, make_settings

ACTIONS = ("add", "list", "remove")


def run(parser: Parser, arguments: Sequence[str]) -> int:
    """Run `sightline keys add`, `list` or `remove`, and return the exit code."""
    parser.description = "Manage the API keys of a service: add, list or remove them."
    parser.epilog = (
        "The file has only the hashes of the keys; `add` prints the new key, once. A running service reads a changed "
        "file within a second.\n\nexample: %(prog)s add alice --keys keys.json"
    )
    parser.add_argument("action", choices=ACTIONS, help="add a key, list the labels and roles, or remove a key")
    parser.add_argument("label", nargs="?", help="name of the key in logs and metrics; not for list")
    add_flags(parser, ["keys"])
    parser.add_argument(
        "--role",
        choices=get_args(Role),
        default="use",
        help="admin may also read /metrics and load models (default: use)",
    )
    for name in Quota.model_fields:
        parser.add_argument(
            flag_name(name), type=int, metavar="N", help=f"quota of a new key: {name.replace('_', ' ')} (default: none)"
        )
    parsed = parser.parse_args(arguments)
    limits = {name: getattr(parsed, name) for name in Quota.model_fields if getattr(parsed, name) is not None}
    for name, limit in limits.items():
        if parsed.action != "add":
            parser.error(f"{flag_name(name)} is only for add; edit the file to change a quota")
        if limit < 1:
            parser.error(f"{flag_name(name)} must be at least 1, got {limit}")
    if (parsed.label is None) != (parsed.action == "list"):
        parser.error(f"{parsed.action} needs {'no label' if parsed.label else 'a label'}")
    try:
        path = make_settings({"keys": parsed.keys}).keys
        if path is None:
            parser.error("name the file of keys with --keys or SIGHTLINE_KEYS")
        if parsed.action == "add":
            print(add_key(path, parsed.label, parsed.role, Quota(**limits) if limits else None))
        elif parsed.action == "remove":
            remove_key(path, parsed.label)
        else:
            for key in read_keys(path):
                quota = {} if key.quota is None else key.quota.model_dump(exclude_none=True)
                print("  ".join([key.label, key.role, *(f"{name}={limit}" for name, limit in quota.items())]))
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeysError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0
