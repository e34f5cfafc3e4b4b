"""An argument parser whose errors are one line, and exit codes."""

import argparse
from typing import Any, NoReturn

EXIT_FAILED = 1  # the work failed
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 and the number of SIGINT, as in shells
EXIT_BROKEN_PIPE = 141  # 128 and the number of SIGPIPE


class Parser(argparse.ArgumentParser):
    """Prints one line that names the error and the way to the help, instead of the whole usage.

    Descriptions and examples are not wrapped, so that an example can be copied.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of `argparse.ArgumentParser`."""
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message}; see `{self.prog} --help`\n")
