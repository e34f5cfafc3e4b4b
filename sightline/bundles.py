"""The bundle that a command uses: the one that its user names, or one of the folder of bundles."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service.bundle import BundleError, Manifest, read_manifest
from service.discovery import find_bundles
from service.settings import Settings


def choose_bundle(
    folder: Path | None,
    settings: Settings,
    is_able: Callable[[Manifest], bool],
    problem: str,
    rank: Callable[[Manifest], Any] = lambda manifest: manifest.name,
) -> tuple[Path, Manifest]:
    """Return the bundle of a folder, or the default model of the folder of bundles.

    Args:
        folder: the bundle that the user names; None if the user names none.
        settings: settings with the folder of bundles and the default model.
        is_able: returns True for a bundle that the command can use.
        problem: what a bundle that is not able lacks, such as "cannot translate".
        rank: key by which the first able bundle is chosen if there is no default model.

    Raises:
        BundleError: there is no such bundle, or it is not able.
    """
    if folder is None:

        def warn(failed: Path, error: BundleError) -> None:
            print(f"warning: {error}", file=sys.stderr)

        found = find_bundles(settings.bundles, settings.default_model, warn)
        named = [one for one, manifest in found.items() if manifest.name == settings.default_model]
        able = [one for one, manifest in found.items() if is_able(manifest)]
        if not named and not able:
            raise BundleError(
                f"no bundle in {settings.bundles} can be used: each of them {problem}; name one with --bundle"
            )
        folder = named[0] if named else min(able, key=lambda one: rank(found[one]))
    manifest = read_manifest(folder)
    if not is_able(manifest):
        raise BundleError(f"{folder} {problem}; its tasks are {', '.join(manifest.tasks)}")
    return folder, manifest
