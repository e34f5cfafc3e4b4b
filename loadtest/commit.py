"""Commit of the working tree, for the record of a result."""

import shutil
import subprocess


def commit() -> str | None:
    """Return the commit, with `-dirty` if files are changed; None outside of a git repository."""
    git = shutil.which("git")
    if git is None:
        return None
    describe = [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    response = subprocess.run(describe, capture_output=True, text=True, check=False)  # noqa: S603 - constant arguments
    return response.stdout.strip() or None
