"""The service in Ray Serve: the application as an ingress deployment, one replica a core or GPU.

It needs the extra `ray`, so only `sightline.service.ray_command` and the configuration of a Ray
cluster (deploy/ray/serve.yaml) import it. See docs/adr/0036-proxies-ray-and-kubernetes.md.
"""

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy
from starlette.types import Message, Receive, Scope, Send

from sightline.base.errors import UsageError
from sightline.base.machine import usable_threads
from sightline.service.api_errors import CLIENT_GONE
from sightline.service.app import create_app
from sightline.service.http.incoming import EXCHANGE, Exchange
from sightline.service.inference.service import Service
from sightline.service.loading import load_backend
from sightline.service.logs import configure_logging
from sightline.service.server import RESPONSE_S, DrainingServer
from sightline.service.settings import Settings, is_loopback, make_settings
from sightline.service.startup import SWITCH_INTERVAL_S, check_settings
from sightline.service.workers.shares import share_of

DEPLOYMENT = "Sightline"
TARGETS = "metrics_targets"  # argument of `build` that is no setting
SEQUENCES = "sequences"  # metric by which Ray chooses the number of replicas
SEQUENCES_OF_REPLICA = 16  # waiting and running ones, for which there is one replica
CANCEL_S = 1.0  # time in which the call of a client that has gone must end
REQUEST_ID = b"x-request-id"
RENEWAL_S = 60.0  # interval in which a replica renews its file for Prometheus
MAX_TARGET_AGE_S = 300.0
logger = logging.getLogger(__name__)


class ResponseBrokenOffError(Exception):
    """The rest of a response cannot be sent; Ray's server closes the connection."""


class ReplicaServer(DrainingServer):
    """Server of one replica on the address of administrators. It also loads and stops the models.

    Requests of clients reach the application through Ray.
    """

    capture_signals = contextlib.nullcontext  # type: ignore[assignment] # Ray has the signals

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super(DrainingServer, self).startup(sockets)


class ReplicaApp:
    """The application as Ray calls it.

    Its lifespan starts when the models are loaded, so that Ray sends no request before.
    """

    def __init__(self, settings: Settings, targets: Path | None) -> None:
        """Create the application of a replica, on a free port for administrators.

        The settings have the replica's share of the limits. `targets` is a folder for the file that
        tells Prometheus the address of the replica.
        """
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port = self._listener.getsockname()[1]
        self._address = f"[{host}]:{port}" if family is socket.AF_INET6 else f"{host}:{port}"
        changes: dict[str, Any] = {"admin_address": self._address}
        if not is_loopback(host):
            changes["host"] = host  # Prometheus sends it as the header Host
        settings = settings.model_copy(update=changes)
        self._target = None if targets is None else TargetFile(targets, self._address)
        self._is_loaded = asyncio.Event()
        self._exit_code: int | None = None
        self._app = create_app(settings, load_backend, self._end, on_ready=self._is_loaded.set)
        self._server = ReplicaServer(self._app, settings)

    @property
    def num_sequences(self) -> int:
        """Number of waiting and running sequences."""
        service: Service = self._app.state.service
        engines = [model.loaded.engine for model in service.models.values() if model.loaded is not None]
        return sum(engine.num_waiting + engine.num_running for engine in engines)

    def _end(self, exit_code: int) -> None:
        if self._is_loaded.is_set():
            self._server.end(exit_code)  # Ray starts another replica
        else:
            self._exit_code = exit_code
            self._is_loaded.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._run(receive, send)
        elif scope["type"] == "http":
            await self._call(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _run(self, receive: Receive, send: Send) -> None:
        await receive()
        serving = asyncio.create_task(self._server.serve(sockets=[self._listener]))
        await self._is_loaded.wait()
        if self._exit_code is not None:
            await send({"type": "lifespan.startup.failed", "message": "the models cannot be loaded"})
            return
        if self._target is not None:
            self._target.try_write()
            renewing = asyncio.create_task(self._target.keep())
        await send({"type": "lifespan.startup.complete"})
        await receive()
        if self._target is not None:
            renewing.cancel()
            self._target.remove()
        self._server.should_exit = True
        await serving
        await send({"type": "lifespan.shutdown.complete"})

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. Ray cancels it if its client has gone."""

        async def send_once(message: Message) -> None:
            if message["type"] == "http.response.start":  # Ray adds the id, too
                message["headers"] = [header for header in message["headers"] if header[0] != REQUEST_ID]
            await send(message)

        exchange = scope[EXCHANGE] = Exchange(self._server.bodies, None, break_off, has_turn=True)
        call = asyncio.create_task(self._app(scope, receive, send_once))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            exchange.lose(CLIENT_GONE)
            await asyncio.wait([call], timeout=CANCEL_S)
            call.cancel()
            raise


def break_off(_: Any) -> None:
    raise ResponseBrokenOffError


class TargetFile:
    """File with the address of a replica, in the format of Prometheus' `file_sd_configs`."""

    def __init__(self, folder: Path, address: str) -> None:
        self._address = address
        self._machine = socket.gethostname()
        self._path = folder / f"{self._machine}-{os.getpid()}.json"

    async def keep(self) -> None:
        """Write the file again and again, so that others know that it is in use."""
        while True:
            await asyncio.sleep(RENEWAL_S)
            self.try_write()

    def try_write(self) -> None:
        """Write the file, or log the error: the replica serves, and the next time may succeed."""
        try:
            self.write()
        except OSError as error:
            logger.warning("%s cannot be written, so that Prometheus may miss this replica: %s", self._path, error)

    def write(self) -> None:
        """Write the file, and remove those of processes of this machine that were killed, and those
        of lost machines, which nobody has renewed for `MAX_TARGET_AGE_S`.
        """
        folder = self._path.parent
        folder.mkdir(parents=True, exist_ok=True)
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps([{"targets": [self._address]}]), encoding="utf-8")
        new.replace(self._path)
        oldest = self._path.stat().st_mtime - MAX_TARGET_AGE_S  # by the clock of the folder's machine
        for path in folder.glob("*.json"):
            machine, _, process = path.stem.rpartition("-")
            is_killed = machine == self._machine and not Path("/proc", process, "exe").exists()  # a zombie has none
            with contextlib.suppress(FileNotFoundError):  # another replica removes it, too
                if is_killed or path.stat().st_mtime < oldest:
                    path.unlink()

    def remove(self) -> None:
        for path in (self._path, self._path.with_suffix(".new")):  # a full disk leaves the second
            path.unlink(missing_ok=True)


class Replica:
    """Deployment whose replicas hold all bundles."""

    def __init__(self, settings: Settings, targets: Path | None = None) -> None:
        configure_logging(settings.log_level)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        cores = max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))
        if settings.provider != "cuda":
            # A machine has as many replicas, which share its memory and its limits.
            settings = share_of(settings, max(1, usable_threads() // cores))
        self._replica = ReplicaApp(settings.model_copy(update={"threads": settings.threads or cores}), targets)

    def __serve_build_asgi_app__(self) -> ReplicaApp:
        return self._replica

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the metrics that Ray collects for `replicas_needed`."""
        return {SEQUENCES: self._replica.num_sequences}


deployment = serve.deployment(name=DEPLOYMENT)(serve.ingress()(Replica))


def replicas_needed(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the number of replicas for the sequences of all replicas, and no state."""
    sequences = (context.aggregated_metrics or {}).get(SEQUENCES, {})
    return sum(sequences.values()) / SEQUENCES_OF_REPLICA, {}


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application of a Ray cluster.

    `arguments` are settings by their names, over those of the environment; `metrics_targets` is a
    folder for the addresses of the replicas' metrics. Paths are those of all machines. Raises
    `UsageError` if a setting is unknown or invalid, and the errors of `check_ray_settings`.
    """
    values = dict(arguments)
    targets = values.pop(TARGETS, None)
    return application(make_settings(values), None if targets is None else Path(targets))


def application(settings: Settings, targets: Path | None, max_replicas: int = 1) -> serve.Application:
    """Return the application with these settings. See `build`.

    `max_replicas` is the largest number of replicas if `workers` is auto.
    """
    check_ray_settings(settings)
    paths = {name: path.resolve() for name in ("bundles", "keys") if (path := getattr(settings, name)) is not None}
    settings = settings.model_copy(update=paths)
    if settings.workers != "auto":
        scaling: dict[str, Any] = {"num_replicas": int(settings.workers)}
    else:
        scaling = {
            "autoscaling_config": AutoscalingConfig(
                min_replicas=1,
                max_replicas=max_replicas,
                upscale_delay_s=5,
                downscale_delay_s=60,
                look_back_period_s=15,
                policy=AutoscalingPolicy(policy_function=replicas_needed),
            )
        }
    resources = {"num_cpus": max(1, settings.threads)}
    if settings.provider == "cuda":
        resources["num_gpus"] = 1
    return deployment.options(
        ray_actor_options=resources,
        max_ongoing_requests=settings.max_connections,  # admission rejects calls before that
        graceful_shutdown_timeout_s=settings.shutdown_timeout_s + RESPONSE_S,
        health_check_period_s=1,
        health_check_timeout_s=settings.request_timeout_s,
        max_constructor_retry_count=3,
        # A single replica ends after the new one is ready, which needs a free core. Of several, one
        # ends before.
        max_surge_percent=0 if settings.workers not in ("auto", "1") else 100,
        **scaling,
    ).bind(settings, None if targets is None else targets.resolve())


def check_ray_settings(settings: Settings) -> None:
    """Check the settings of a service in Ray.

    Raises `UsageError` if a setting does not work in Ray, or the replicas cannot share the
    counts of quotas, and the errors of `check_settings`.
    """
    if settings.model_control == "explicit":
        raise UsageError(
            "SIGHTLINE_MODEL_CONTROL (--model-control) must be none in Ray Serve: a request to load a model would "
            "reach one replica only; deploy the application again to change its bundles"
        )
    if settings.admin_address is not None:
        raise UsageError(
            "SIGHTLINE_ADMIN_ADDRESS (--admin-address) must not be set in Ray Serve: each replica takes a free port "
            "for /metrics; read the addresses from the folder of metrics_targets (--metrics-targets)"
        )
    keys = check_settings(settings)
    if settings.quota_storage_url is None and any(key.quota is not None for key in keys):
        raise UsageError(
            "SIGHTLINE_QUOTA_STORAGE (--quota-storage) must be set in Ray Serve, because keys have quotas: otherwise "
            "each replica would count for itself"
        )
