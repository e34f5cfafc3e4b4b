"""The bundle that a command runs: the one that its user names, or one of the folder of bundles."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from sightline import __version__
from sightline.base.bundle import BundleError, Manifest
from sightline.base.bundle_files import read_manifest
from sightline.base.errors import UsageError
from sightline.service.discovery import find_bundles
from sightline.service.inference.changes import NoPeers
from sightline.service.inference.service import ServedModel, Service
from sightline.service.metrics import Metrics
from sightline.service.settings import ALL_MODELS, Settings


def choose_bundle(
    folder: Path | None, settings: Settings, is_able: Callable[[Manifest], bool], problem: str
) -> tuple[Path, Manifest]:
    """Return the bundle of a folder, or a bundle of the folder of bundles if the user names none.

    That is the first default model of the settings that the command can use, or else the only
    bundle that it can use, as for requests that name no model. `problem` is the lack of a bundle
    that is not able, such as "cannot translate". Raises `BundleError` if there is no such bundle
    or it is damaged, and `UsageError` if several could be meant or it is not able.
    """
    if folder is not None:
        manifest = read_manifest(folder)
        if not is_able(manifest):
            raise UsageError(f"{folder} {problem}; its tasks are {', '.join(manifest.tasks)}")
        return folder, manifest

    manifests = find_bundles(settings.bundles, settings.default_model_names, _warn)
    able = {manifest.name: path for path, manifest in manifests.items() if is_able(manifest)}
    if not able:
        raise UsageError(f"no bundle in {settings.bundles} can be used: each of them {problem}; name one with --bundle")
    chosen = [name for name in settings.default_model_names if name in able] or list(able)
    if len(able) > 1 and not set(settings.default_model_names) & able.keys():
        raise UsageError(
            f"several bundles in {settings.bundles} can be used: {', '.join(able)}; name one with --bundle, or set a "
            "default with `sightline models default` or SIGHTLINE_DEFAULT_MODEL"
        )
    folder = able[chosen[0]]
    return folder, manifests[folder]


def _warn(failed: Path, error: BundleError) -> None:
    print(f"warning: {error}", file=sys.stderr)


def load_service(folder: Path, manifest: Manifest, settings: Settings) -> tuple[Service, ServedModel]:
    """Return a service with one bundle, and its model; the caller starts and stops the worker.

    Raises `BundleError` or `RuntimeUnavailableError`.
    """
    settings = settings.model_copy(update={"default_model": manifest.name, "lazy_models": ""})
    service = _service_of({folder: manifest}, settings)
    loaded = service.models[manifest.name].loaded
    assert loaded is not None
    return service, loaded.model


def service_of_all(folder: Path | None, settings: Settings) -> Service:
    """Return a service with the bundle of a folder, or with all of the folder of bundles, of which
    the first use loads each. The caller starts and stops the worker. Raises as `load_service`.
    """
    if folder is not None:
        return load_service(folder, read_manifest(folder), settings)[0]
    manifests = find_bundles(settings.bundles, settings.default_model_names, _warn)
    return _service_of(manifests, settings.model_copy(update={"lazy_models": ALL_MODELS}))


def _service_of(bundles: Mapping[Path, Manifest], settings: Settings) -> Service:
    from sightline.service.loading import load_bundles  # imports ONNX Runtime

    service = Service(settings, Metrics(__version__), NoPeers())
    service.attach(load_bundles(bundles, settings, service.metrics.for_model))
    return service
