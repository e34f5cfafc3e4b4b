"""Commands that write or check a bundle, and print the record of it."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from pydantic import BaseModel

from sightline.base.errors import CommandError, exit_status, fail
from sightline.base.options import Options, parse
from sightline.base.parser import Parser
from sightline.export.import_errors import one_line
from sightline.export.limits import out_of_memory
from sightline.export.options import (
    AlignOptions,
    CheckpointOptions,
    CoverageOptions,
    PackOptions,
    QuantizeOptions,
    ShortlistOptions,
    VerifyOptions,
)

ACTIONS = "sightline.export.commands"  # needs libraries that `--help` and wrong options do not
# The options of each command, which has an action of the same name.
OPTIONS: Mapping[str, type[Options]] = {
    "export": CheckpointOptions,
    "verify": VerifyOptions,
    "align": AlignOptions,
    "coverage": CoverageOptions,
    "quantize": QuantizeOptions,
    "pack": PackOptions,
    "shortlist": ShortlistOptions,
}


def run_action(action: Callable[[], BaseModel]) -> int:
    """Run an action, print its result or error, and return the exit code."""
    try:
        record = action()
    except (CommandError, OSError, ValueError) as error:
        return fail(one_line(error), exit_status(error))
    except MemoryError:
        return fail(out_of_memory())
    print(record.model_dump_json(indent=2))
    return 0


def run(parser: Parser, words: Sequence[str]) -> int:
    """Run the command whose name is the last word of the parser's program."""
    name = parser.prog.split()[-1]
    options = parse(parser, words, OPTIONS[name])
    return run_action(lambda: getattr(import_module(ACTIONS), name)(options))
