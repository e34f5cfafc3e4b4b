"""`sightline COMMAND`: serve, train, export, translate and load, and list the models.

Each command imports what it needs when it runs, so that an installation without PyTorch or without
ONNX Runtime has the commands that can do without them.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from sightline import __version__
from sightline.base.errors import (
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    CommandError,
    UsageError,
    did_you_mean,
    exit_status,
    fail,
)
from sightline.base.extras import missing_library
from sightline.base.parser import Parser


@dataclass(frozen=True)
class Command:
    """A command of `sightline`; its module in `sightline.commands` has its name or is `actions`."""

    help: str
    extras: str = ""  # extras of the installation that have its libraries


COMMANDS = {
    "serve": Command("serve models over HTTP: bundles of a folder, or models that it imports first", "cpu,import"),
    "translate": Command("translate documents, or the lines of a file", "cpu"),
    "draw": Command("draw the attention of a model for one text as SVG", "cpu"),
    "models": Command(
        "list the bundles of a folder, choose defaults, get a model, or check which can be imported", "cpu,import"
    ),
    "keys": Command("add, list and remove API keys", "cpu"),
    "load": Command("measure a running service under load, or compare two such runs"),
    "train": Command("train a model on your own data", "train"),
    "evaluate": Command("compute the metrics of a trained model", "train"),
    "export": Command("export a training run, or import a third-party model, as a bundle", "cpu,train"),
    "verify": Command("compare a bundle with its checkpoint", "cpu,train"),
    "align": Command("choose the heads of a bundle that align words", "cpu,import"),
    "coverage": Command("choose the head of a bundle that shows omitted words", "cpu,import"),
    "quantize": Command("quantize a bundle to 8-bit or 4-bit weights, or to float16 for CUDA", "cpu,import"),
    "pack": Command("store the matrices of a bundle in 8 bits", "cpu,import"),
    "shortlist": Command("restrict a translation model to likely tokens, which is faster", "cpu,import"),
}

# The commands of `actions`, which read files that others wrote, in a child process with limits, as
# `models get` does.
LIMITED = ("export", "verify", "align", "coverage", "quantize", "pack", "shortlist")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] not in COMMANDS:
        if words and not words[0].startswith("-"):
            overview().error(f"unknown command {words[0]}{did_you_mean(words[0], COMMANDS)}")
        overview().parse_args(words)  # prints the help, the version or an error
    name, *rest = words
    if sys.stdout is None:  # the next file that is opened would get its number
        return fail("standard output is closed")
    if arguments is None and (name in LIMITED or words[:2] == ["models", "get"]):
        from sightline.export.limits import needs_limits, run_limited

        if needs_limits(words):
            return run_limited("sightline", words)
    try:
        command = import_module(f"sightline.commands.{'actions' if name in LIMITED else name}")
        code: int = command.run(Parser(prog=f"sightline {name}", allow_abbrev=False), rest)
        sys.stdout.flush()
        return code
    except ModuleNotFoundError as error:
        missing = missing_library(error, COMMANDS[name].extras)
        if missing is None:
            raise
        return fail(f"sightline {name} needs {missing}", EXIT_USAGE)
    except (CommandError, UsageError) as error:
        return fail(error)
    except KeyboardInterrupt:
        return fail(f"sightline {name} was interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:  # the reader of the output has gone
        _drop_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.filename is None:
            _drop_output()
        return fail(f"{error.filename or 'the output'}: {error.strerror}", exit_status(error))
    except UnicodeError as error:
        return fail(f"an argument or a text is not UTF-8: {error}; convert it to UTF-8", EXIT_USAGE)
    except OverflowError as error:
        return fail(f"a number is too large: {error}", EXIT_USAGE)


def _drop_output() -> None:
    """Drop what is left of the output; otherwise Python reports the same error at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def overview() -> Parser:
    """Return the parser of a command line without a command; it never succeeds."""
    width = max(map(len, COMMANDS))
    descriptions = "\n".join(f"  {name:{width}}  {command.help}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="sightline",
        usage="%(prog)s [-h] [--version] COMMAND ...",
        description="Serve trained attention models over HTTP and look inside; import, export and train them.",
        epilog=f"commands (`sightline COMMAND --help` describes each):\n{descriptions}\n\n"
        "example: sightline serve --bundles bundles",
    )
    parser.add_argument("--version", action="version", version=f"sightline {__version__}", help="print the version")
    parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
