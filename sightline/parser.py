"""An argument parser whose errors are one line, and exit codes."""

import argparse
from typing import NoReturn

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 and the number of SIGINT, as in shells
EXIT_BROKEN_PIPE = 141  # 128 and the number of SIGPIPE


class Parser(argparse.ArgumentParser):
    """Prints one line that names the error and the way to the help, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"error: {message}; see `{self.prog} --help`\n")
