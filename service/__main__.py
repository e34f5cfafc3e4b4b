"""`python -m sightline.service`: read the settings and serve.

The exit code is 0 after a signal and a drain, even if the drain took too long; 1 if the engine died
or a second signal cut the drain short; 2 if the settings or the installation cannot be used; 3 if
no bundle can be served or the port is taken.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

from sightline.base.errors import EXIT_USAGE, CommandError, UsageError, fail
from sightline.base.options import Options, Shown, add_options, check, given_flags
from sightline.service.logs import configure_logging, open_missing_streams
from sightline.service.settings import Settings, make_settings, read_flags, service_parser
from sightline.service.startup import SWITCH_INTERVAL_S, check_settings

RUNTIMES = ("onnxruntime", "onnxruntime-gpu")


class RayOptions(Options):
    """Options of the service in Ray Serve."""

    ray: bool = False
    """Serve in Ray Serve, with one replica a core (extra `ray`); a GPU is experimental."""
    address: str | None = None
    """With --ray: address of a running Ray cluster, such as 10.0.0.1:6379 or auto. If not given, a
    cluster is started on this machine."""
    metrics_targets: Annotated[Path | None, Shown("FOLDER")] = None
    """With --ray: folder for files with the addresses of the replicas' metrics, which Prometheus
    discovers."""


def main(
    arguments: Sequence[str],
    parser: argparse.ArgumentParser | None = None,
    prepare: Callable[[Settings, Mapping[str, Any]], Settings] = lambda settings, _: settings,
) -> int:
    """Serve, and return the exit code if the service cannot start.

    `parser` gets the flags; by default that of `python -m sightline.service`. `prepare` gets the
    values of all flags, and returns the settings to serve with or ends the process.
    """
    open_missing_streams()
    parser = parser or service_parser()
    add_options(parser, RayOptions, RayOptions.model_fields)
    try:
        flags = read_flags(parser, arguments)
        settings, options = make_settings(flags), check(RayOptions, given_flags(RayOptions, flags))
        if not options.ray and (options.address or options.metrics_targets):
            raise UsageError("--address and --metrics-targets need --ray")
        check_one_runtime([name for name in RUNTIMES if any(distributions(name=name))])
        check_settings(settings)
    except (CommandError, UsageError) as error:
        return fail(f"{error}; starting again will not help until this is fixed", EXIT_USAGE)
    # Until the server has its own handler. The first process of a container has none by default,
    # and would ignore the signal.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    configure_logging(settings.log_level)
    settings = prepare(settings, flags)
    if options.ray:
        from sightline.service.ray_command import serve_with_ray

        try:
            return serve_with_ray(settings, options.address, options.metrics_targets)
        except UsageError as error:
            return fail(error)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Imported here, once the installation is known to be sound: it imports ONNX Runtime, which
    # takes most of the start.
    from sightline.service.server import serve
    from sightline.service.workers.shares import max_workers
    from sightline.service.workers.supervisor import supervise

    num_workers = max_workers(settings)
    return serve(settings) if num_workers == 1 else supervise(settings, num_workers)


def check_one_runtime(installed: Sequence[str]) -> None:
    """Raise `UsageError` unless exactly one ONNX Runtime is installed.

    Two overwrite each other's files.
    """
    if len(installed) == len(RUNTIMES):
        raise UsageError(
            f"{' and '.join(installed)} are both installed and overwrite each other's files; "
            "remove both, then install the extra 'cpu' or the extra 'gpu'"
        )
    if not installed:
        raise UsageError("no ONNX Runtime is installed; install the extra 'cpu' or the extra 'gpu'")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
