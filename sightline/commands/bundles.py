"""The bundle that a command runs: the one that its user names, or one of the folder of bundles."""

import sys
from collections.abc import Callable
from pathlib import Path

from sightline.base.bundle import Manifest
from sightline.base.bundle_files import read_manifest
from sightline.base.errors import UsageError
from sightline.service.discovery import find_bundles
from sightline.service.settings import Settings


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

    manifests = find_bundles(
        settings.bundles,
        settings.default_model_names,
        lambda _, error: print(f"warning: {error}", file=sys.stderr),
    )
    able = {manifest.name: path for path, manifest in manifests.items() if is_able(manifest)}
    if not able:
        raise UsageError(f"no bundle in {settings.bundles} can be used: each of them {problem}; name one with --bundle")
    chosen = [name for name in settings.default_model_names if name in able] or list(able)
    if len(able) > 1 and chosen[0] not in settings.default_model_names:
        raise UsageError(
            f"several bundles in {settings.bundles} can be used: {', '.join(able)}; name one with --bundle, or set a "
            "default with `sightline models default` or SIGHTLINE_DEFAULT_MODEL"
        )
    folder = able[chosen[0]]
    return folder, manifests[folder]


def bundle_name(model: str) -> str:
    """Return the name of the bundle of a model of the catalogue, of Firefox or of a hub."""
    from sightline.export.sources.catalogue import CATALOGUE
    from sightline.export.sources.download import parse_repository
    from sightline.export.sources.firefox.published import PREFIX

    if model.startswith(PREFIX):
        return model.replace(PREFIX, "firefox-").lower()
    return model if model in CATALOGUE else parse_repository(model).name.partition("/")[2]
