"""Which commit a result belongs to."""

import shutil
import subprocess


def commit() -> str | None:
    """The commit of the working tree, with `-dirty` where files differ from it; None outside git."""
    git = shutil.which("git")
    if git is None:
        return None
    describe = [git, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    answer = subprocess.run(describe, capture_output=True, text=True, check=False)  # noqa: S603 - no input in it
    return answer.stdout.strip() or None
