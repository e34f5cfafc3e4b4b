"""`python -m service`: read the settings, serve, and say by the exit code how it ended.

0 after a drain, also one whose time ran out, 1 where the engine died or a second signal cut the drain short, 2 for
settings or an installation that cannot be used, 3 for a bundle that cannot be served or a port that cannot be had.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from service.logs import configure_logging, open_missing_streams
from service.settings import SettingsError, read_settings

EXIT_SETTINGS = 2
# Seconds after which a busy thread hands over the interpreter. The engine's thread asks for it after every step, and
# would wait for Python's default of 5 ms, longer than most steps, whenever the event loop is busy.
SWITCH_INTERVAL_S = 0.0005
RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


def main(arguments: Sequence[str]) -> int:
    open_missing_streams()
    try:
        settings = read_settings(arguments)
        check_one_runtime([name for name in RUNTIMES if is_installed(name)])
    except SettingsError as error:
        print(f"error: {error}; starting again will not help until this is fixed", file=sys.stderr)
        return EXIT_SETTINGS
    configure_logging(settings.log_level)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Only now that the installation is known to be sound: this imports ONNX Runtime, and takes most of the start.
    from service.http.server import serve

    return serve(settings)


def check_one_runtime(installed: Sequence[str]) -> None:
    """Check that one ONNX Runtime is installed: two overwrite each other's files.

    Raises:
        SettingsError: none or both are; the message says what to do.
    """
    if len(installed) == len(RUNTIMES):
        raise SettingsError(
            f"{' and '.join(installed)} are both installed and overwrite each other's files; "
            "remove both, then install the extra 'cpu' or the extra 'gpu'"
        )
    if not installed:
        raise SettingsError("no ONNX Runtime is installed; install the extra 'cpu' or the extra 'gpu'")


def is_installed(distribution: str) -> bool:
    try:
        version(distribution)
    except PackageNotFoundError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
