"""An argument parser whose errors are one line. It needs no library."""

import argparse
from typing import Any, NoReturn

from sightline.base.errors import EXIT_USAGE, did_you_mean

UNKNOWN = "unrecognized arguments: "  # beginning of a message of argparse


class Parser(argparse.ArgumentParser):
    """Prints one line that names the error and the way to the help, instead of the whole usage.

    Descriptions and examples are not wrapped, so that an example can be copied.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of `argparse.ArgumentParser`."""
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        if message.startswith(UNKNOWN):
            flag = message.removeprefix(UNKNOWN).split(maxsplit=1)[0].partition("=")[0]
            message += did_you_mean(flag, self._option_string_actions)
        self.exit(EXIT_USAGE, f"error: {message.removeprefix('argument ')}; see `{self.prog} --help`\n")
