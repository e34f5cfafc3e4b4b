"""Server of the process: uvicorn with connection limits and a graceful shutdown.

After the first signal, `/health/ready` returns 503 `draining` for the drain window, so that load
balancers choose other servers. Requests that still arrive are served, and each response closes its
connection. Then the listener closes and the remaining requests have the shutdown timeout. A second
signal ends the process immediately.
"""

import asyncio
import ctypes
import functools
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from sightline import __version__
from sightline.base.errors import EXIT_CANNOT_SERVE, EXIT_FAILED
from sightline.service.app import create_app
from sightline.service.http.connections import ConnectionLimits
from sightline.service.http.dispatch import rejection_logger
from sightline.service.http.guarded_protocol import GuardedProtocol
from sightline.service.http.incoming import IncomingBodies
from sightline.service.inference.service import Service
from sightline.service.loading import load_backend
from sightline.service.logs import flush_logs
from sightline.service.settings import Settings, env_name

# The engine needs up to two seconds to fail a hanging call; then responses must still be sent.
RESPONSE_S = 4
# Maximum duration of an end without a drain, so that a supervisor can restart the process soon.
# Together with `FLUSH_S` of the logs it stays below two seconds.
END_S = 1.0
# An address for clients on this machine, by an address that means every interface.
ANY_ADDRESS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # noqa: S104 - nothing is bound to it
_handlers: list[Any] = []  # C functions, which must exist as long as the process
logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Serves one app until a signal or a call of `end`."""

    def __init__(self, app: FastAPI, settings: Settings, end_now: Callable[[int], Any] = os._exit) -> None:
        """`end_now` ends the process at once: a running graph would delay an orderly exit."""
        self._end_now = end_now
        self._settings = settings
        self._service: Service = app.state.service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_draining = False
        self.exit_code = 0
        metrics = self._service.metrics
        self.connections = ConnectionLimits(
            settings.max_connections, settings.max_connections_per_address, metrics.count_limit
        )
        metrics.process_gauges["connections"].set_function(lambda: self.connections.num_open)
        self.bodies = IncomingBodies(settings.max_waiting_bytes, functools.partial(metrics.count_limit, "body_bytes"))
        protocol: Any = functools.partial(
            GuardedProtocol,
            settings=settings,
            connections=self.connections,
            bodies=self.bodies,
            on_rejection=rejection_logger(metrics),
        )
        self._protocol = protocol
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http=protocol,
                ws="none",
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=settings.keep_alive_s,
                timeout_graceful_shutdown=int(settings.shutdown_timeout_s) + RESPONSE_S,
            )
        )

    @property
    def port(self) -> int:
        return int(self.servers[0].sockets[0].getsockname()[1])

    def run_to_exit(self) -> NoReturn:
        """Serve until the server ends, then exit the process."""
        try:
            self.run()
        except SystemExit as ended:  # the port is not available, which is logged
            self.exit_code = int(ended.code or 0)
        log_end(self.exit_code)
        # A normal exit of the interpreter would wait for native threads, and so for an engine that
        # hangs.
        os._exit(self.exit_code)

    def end(self, exit_code: int) -> None:
        """End without a drain, because no engine can serve any more.

        Failed calls get their responses; everything else is cut off after `END_S`.
        """
        self.exit_code = exit_code
        self.should_exit = True
        # A thread, because the event loop can close before everything has ended.
        timer = threading.Timer(END_S, self._end_at_once, (exit_code,))
        timer.daemon = True
        timer.start()

    def _end_at_once(self, exit_code: int) -> None:
        log_end(exit_code)
        self._end_now(exit_code)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        if sockets is None:
            try:
                sockets = await bind(self._settings)
            except OSError as error:
                logger.error(error)
                raise SystemExit(EXIT_CANNOT_SERVE) from None
        await super().startup(sockets)
        if self.servers:  # a worker has none
            log_listening(self._settings.host, self.port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start to drain; end at the second signal.

        There is no drain window after SIGINT, which comes from a keyboard, nor while the models
        load: in both cases no load balancer needs time to choose another server.
        """
        if self._loop is None or self._is_draining or self.should_exit:
            self._end_at_once(EXIT_FAILED)
            return
        self._is_draining = True
        has_window = sig != signal.SIGINT and self._service.unavailable_code != "loading"
        drain_s = self._settings.drain_s if has_window else 0.0
        self._loop.call_soon_threadsafe(log_draining, self._settings, drain_s)
        self._loop.call_soon_threadsafe(self._begin_drain, drain_s)

    def _begin_drain(self, drain_s: float) -> None:
        assert self._loop is not None
        self._service.begin_drain()
        self._loop.call_later(drain_s, setattr, self, "should_exit", True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close the listener and wait. The engine fails requests that do not finish in time."""
        self._service.drain()
        stopping = asyncio.ensure_future(self._service.stop())
        await super().shutdown(sockets)
        await stopping
        for connection in list(self.server_state.connections):  # their clients do not read the responses
            connection.transport.abort()


async def bind(settings: Settings) -> list[socket.socket]:
    """Return sockets that are bound to the addresses of the service.

    Raises `OSError` if an address cannot be used.
    """
    sockets: list[socket.socket] = []
    for number, (host, port) in enumerate(settings.addresses):
        try:
            sockets += _bind_both(port) if host == "::" else await _bind(host, port)
        except (OSError, ValueError) as error:  # ValueError: no system accepts such a name
            for listener in sockets:
                listener.close()
            names = env_name("admin_address") if number else f"{env_name('host')} and {env_name('port')}"
            reason = (getattr(error, "strerror", None) or str(error)).rpartition("): ")[2].partition(" (while ")[0]
            raise OSError(f"the service cannot listen on {host!r}, port {port} ({names}): {reason.lower()}") from None
    return sockets


async def _bind(host: str, port: int) -> list[socket.socket]:
    server = await asyncio.get_running_loop().create_server(asyncio.Protocol, host, port, start_serving=False)
    sockets = [socket.socket(fileno=os.dup(listener.fileno())) for listener in server.sockets]
    server.close()
    return sockets


def _bind_both(port: int) -> list[socket.socket]:
    """Return a socket for all addresses, of IPv6 and IPv4, or of IPv4 alone if there is no IPv6."""
    if socket.has_dualstack_ipv6():
        return [socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)]
    return [socket.create_server(("", port))]


def url_of(host: str, port: int) -> str:
    """Return a URL at which a client on this machine reaches the service."""
    host = ANY_ADDRESS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def log_listening(host: str, port: int) -> None:
    """Log the address of the service."""
    url = url_of(host, port)
    text = f"Sightline {__version__} listens on {url} (documentation: {url}/docs) and loads its models"
    fields = {"host": host, "port": port, "url": url, "version": __version__}
    logger.info("listening", extra={"fields": fields, "text": text})


def log_page(settings: Settings, port: int) -> None:
    """Log the address to open in a browser, as the last line of the start."""
    url = url_of(settings.host, port) + ("/" if settings.page else "/docs")
    logger.info("open", extra={"fields": {"url": url}, "text": f"ready for requests; open {url} in a browser"})


def log_draining(settings: Settings, drain_s: float) -> None:
    fields = {"drain_s": drain_s, "shutdown_timeout_s": settings.shutdown_timeout_s}
    logger.info("draining; a second signal ends at once", extra={"fields": fields})


def log_end(exit_code: int) -> None:
    level = logging.WARNING if exit_code else logging.INFO
    advice = "; starting again will not help until the cause is removed" if exit_code == EXIT_CANNOT_SERVE else ""
    logger.log(level, "ended%s", advice, extra={"fields": {"exit_code": exit_code}})
    flush_logs()


def explain_bus_errors() -> None:
    """Log a line before the process ends by SIGBUS.

    The kernel sends it if a mapped file, such as the weights of a bundle, was truncated. A handler
    of Python's module `signal` would never run, because the thread cannot go on.
    """
    libc = ctypes.CDLL(None)

    def on_bus_error(number: int) -> None:
        logger.error(
            "a file that is in use, probably the weights of a bundle, was overwritten or truncated in place, and the "
            "process ends (SIGBUS); write a new bundle beside the old one, and then rename it"
        )
        flush_logs()
        libc.signal(number, None)  # the default, which ends the process
        os.kill(os.getpid(), number)

    _handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int)(on_bus_error))
    libc.signal(signal.SIGBUS, _handlers[-1])


def has_terminal() -> bool:
    """Return True if the process was started from a terminal, whose end sends SIGHUP."""
    try:
        return os.isatty(0)
    except OSError:
        return False


def serve(settings: Settings) -> NoReturn:
    """Serve in this process until the server ends, then exit the process."""
    if not has_terminal():  # without a handler, SIGHUP would end the process
        text = "SIGHUP replaces workers, but this service is one process; restart it to read the bundles again"
        signal.signal(signal.SIGHUP, lambda number, frame: logger.warning(text))
    explain_bus_errors()
    app = create_app(
        settings,
        load_backend,
        lambda exit_code: server.end(exit_code),
        on_ready=lambda: log_page(settings, server.port),
    )
    server = DrainingServer(app, settings)
    server.run_to_exit()
