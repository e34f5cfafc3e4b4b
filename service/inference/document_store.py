"""A folder of translated documents that wait for their download."""

import asyncio
import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any, Literal, cast

from sightline.service.api_errors import ApiError

MAX_AGE_S = 30 * 60
MAX_BODIES = 8  # size of all documents, in bodies of the largest size
State = Literal["translating", "done", "error"]


class DocumentStore:
    """Translated documents until their download, in a folder that all processes of a user share.

    A file is named after the hash of its key, which only its client has. Its first line is the
    state of the translation; the document or the message of the error follows.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._folder = Path(tempfile.gettempdir()) / f"sightline-{os.getuid()}"
        self.running = set[asyncio.Task[Any]]()  # translations of this process

    def put(self, key: str, state: State, data: bytes = b"") -> None:
        """Write a document. Raises `overloaded` if there is no room for it."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.is_symlink() or self._folder.stat().st_uid != os.getuid():
                raise PermissionError
            if self._clean() + len(data) > self._max_bytes and state == "done":
                message = f"The documents that wait for their download may have {self._max_bytes} bytes together "
                message += f"({MAX_BODIES} times SIGHTLINE_MAX_BODY_BYTES), and this one is too large. Retry later."
                raise ApiError("overloaded", message)
            new = self._path(key).with_suffix(".new")
            new.write_bytes(state.encode() + b"\n" + data)
            new.replace(self._path(key))
        except OSError:
            message = "The service cannot write to its temporary folder (TMPDIR), or that is full; tell its operator."
            raise ApiError("overloaded", message) from None
        asyncio.get_running_loop().call_later(MAX_AGE_S + 1, self._clean)

    def get(self, key: str) -> tuple[State, bytes]:
        """Return the state of a document, and its content. Raises `not_found`."""
        try:
            state, _, data = self._path(key).read_bytes().partition(b"\n")
        except OSError:
            kept = f"documents are kept until their download, for {MAX_AGE_S // 60} minutes"
            raise ApiError("not_found", f"There is no such document; {kept}.") from None
        return cast(State, state.decode()), data

    def remove(self, key: str) -> None:
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()

    def _clean(self) -> int:
        """Remove what is too old, and return the size of the rest."""
        size = 0
        for file in self._folder.glob("*"):
            with contextlib.suppress(OSError):  # another process has removed it
                if time.time() - file.stat().st_mtime > MAX_AGE_S:
                    file.unlink()
                else:
                    size += file.stat().st_size
        return size
