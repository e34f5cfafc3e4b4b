"""An argument parser whose errors are one line, and exit codes."""

import argparse
import difflib
from typing import Any, NoReturn

EXIT_FAILED = 1  # the work failed
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 and the number of SIGINT, as in shells
EXIT_BROKEN_PIPE = 141  # 128 and the number of SIGPIPE
# Exit statuses of all commands, for the documentation.
EXIT_STATUSES = {
    0: "The command is done. For `serve`: a signal ended the service.",
    EXIT_FAILED: "The work failed: a file is damaged, a text is too long, a verification found a difference, or memory "
    "or disk or the network failed. For `serve`: the engine failed, or a second signal cut the shutdown short.",
    EXIT_USAGE: "The command can never work as it is given: an option is unknown, a value is not allowed, options or "
    "settings contradict each other or the model, a file or bundle that an argument names is missing, or a library "
    "is not installed.",
    3: "Only `serve`: no bundle can be served, or the address cannot be used.",
    4: "Only `load`: the run is invalid, because the load test itself was too slow.",
    5: "Only `load`: a figure became worse, between two runs or during a soak.",
    EXIT_INTERRUPTED: "Ctrl-C ended the command.",
    EXIT_BROKEN_PIPE: "The reader of the output has ended.",
}


class Parser(argparse.ArgumentParser):
    """Prints one line that names the error and the way to the help, instead of the whole usage.

    Descriptions and examples are not wrapped, so that an example can be copied.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Take the arguments of `argparse.ArgumentParser`."""
        super().__init__(*arguments, **{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        _, _, unknown = message.partition("unrecognized arguments: ")
        for word in unknown.split():
            option = word.partition("=")[0]
            similar = difflib.get_close_matches(option, self._option_string_actions, n=1)
            if option.startswith("--") and similar:
                message += f" (did you mean {similar[0]}?)"
                break
        self.exit(EXIT_USAGE, f"error: {message}; see `{self.prog} --help`\n")
