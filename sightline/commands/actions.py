"""Actions that write or check a bundle, and print the record of it."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType

from pydantic import BaseModel

from sightline.base.bundle import BundleError
from sightline.base.errors import EXIT_FAILED, exit_status
from sightline.base.options import Options, parse
from sightline.base.parser import Parser
from sightline.export.import_errors import VerificationError, one_line
from sightline.export.limits import out_of_memory


def actions() -> ModuleType:
    """Import the actions, which need libraries that `--help` and wrong options do not."""
    return import_module("sightline.export.commands")


def run_action(action: Callable[[], BaseModel]) -> int:
    """Run an action, print its result or error, and return the exit code."""
    try:
        record = action()
    except (OSError, ValueError, BundleError, VerificationError) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return exit_status(error)
    except MemoryError:
        print(f"error: {out_of_memory()}", file=sys.stderr)
        return EXIT_FAILED
    print(record.model_dump_json(indent=2))
    return 0


def action_command(name: str, kind: type[Options]) -> Callable[[Parser, Sequence[str]], int]:
    """Return a command that runs the action of this name, which takes options of this kind."""

    def run(parser: Parser, words: Sequence[str]) -> int:
        options = parse(parser, words, kind)
        return run_action(lambda: getattr(actions(), name)(options))

    return run
