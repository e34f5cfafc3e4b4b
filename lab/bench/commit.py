"""Find the commit that a result is measured at, and the changes since then that may affect it."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Files that a measurement depends on. Results, documents and model cards are left out, because a
# run with several sections writes them itself.
MEASURED = (
    "bundles",
    "constraints-gpu.txt",
    "constraints.txt",
    "export",
    "lab",
    "loadtest",
    "model",
    "pyproject.toml",
    "service",
    "sightline",
    "translation",
    "tests/export",  # writes third-party models
    ":(exclude)lab/bench/results",
    ":(exclude)lab/study/results",
    ":(exclude,glob)**/*.md",
)
MAX_NAMED = 5


class DirtyTreeError(Exception):
    """The checkout has uncommitted changes, so that its commit does not describe a measurement."""


def head(root: Path = ROOT) -> str | None:
    """Return the hash of the checked-out commit, or None outside a git repository."""
    return git(root, "rev-parse", "HEAD")


def uncommitted_changes(root: Path = ROOT) -> list[str]:
    """Return files that measurements depend on and that differ from the commit, also new ones."""
    options = ("--porcelain", "-z", "--untracked-files=all", "--no-renames")
    status = git(root, "status", *options, "--", *MEASURED) or ""
    return sorted(entry[3:] for entry in status.split("\0") if entry)


def commit_facts(allow_dirty: bool, root: Path = ROOT) -> dict[str, object]:
    """Return the fields `commit` and, if there are uncommitted changes, `changed` of a result.
    Raises `DirtyTreeError` for such changes unless `allow_dirty`.
    """
    commit, changed = head(root), uncommitted_changes(root)
    if not changed:
        return {"commit": commit}
    if not allow_dirty:
        raise DirtyTreeError(
            f"{_named(changed)} in {root} differ from commit {commit}. Commit the changes, or allow them with "
            "--allow-dirty; the result then lists the changed files."
        )
    return {"commit": commit, "changed": changed}


def _named(files: Sequence[str]) -> str:
    more = len(files) - MAX_NAMED
    return ", ".join(files[:MAX_NAMED]) + (f" and {more} more files" if more > 0 else "")


def git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command, or None if it fails."""
    git = shutil.which("git")
    if git is None:
        return None
    done = subprocess.run([git, "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.rstrip("\n") if done.returncode == 0 else None
