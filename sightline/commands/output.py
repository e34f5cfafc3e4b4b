"""Output of a translation: standard output, or a file that a later run can complete."""

import fcntl
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

from sightline.base.errors import CommandError, UsageError


class StreamOutput:
    """Writes lines to standard output, a device or a pipe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.num_done = 0  # lines that are written already

    def write(self, lines: Sequence[str]) -> None:
        self._stream.write(to_bytes(lines))
        self._stream.flush()
        self.num_done += len(lines)


class Progress:
    """Finished parts of a translation, which a later run continues if this process is killed.

    Until the translation is complete, the file `NAME.progress` beside its target has the inputs of
    the run in its first line, and a part in each other line, as JSON.
    """

    def __init__(self, target: Path, inputs: Mapping[str, Any]) -> None:
        """Open or continue the file; the parts depend on nothing but `inputs`, which JSON can hold.

        Raises `OSError`, `CommandError` if another process writes the file, or `UsageError` if it
        was begun with other inputs.
        """
        self._target, self._path = target, target.with_name(f"{target.name}.progress")
        self._file = self._path.open("ab+", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise CommandError(f"{target} is being written by another process; choose another --out") from None
        self._file.seek(0)
        data = self._file.read()
        complete = data[: data.rfind(b"\n") + 1]  # a line that was not written as a whole has no end
        self._file.truncate(len(complete))
        try:
            begun, *self.done = [json.loads(line) for line in complete.splitlines()] or [None]
            changed = [name for name, value in inputs.items() if begun is not None and begun[name] != value]
        except (KeyError, TypeError, ValueError):
            changed = ["program"]
        if changed:
            self._file.close()
            raise UsageError(
                f"{target} was begun with another {' and '.join(changed)}; remove {self._path} to start again, or "
                "choose another --out"
            )
        if begun is None:
            self._append([dict(inputs)])

    @property
    def num_done(self) -> int:
        return len(self.done)

    def write(self, parts: Sequence[Any]) -> None:
        self._append(parts)
        self.done += parts

    def _append(self, records: Sequence[Any]) -> None:
        data = memoryview(to_bytes(list(map(json.dumps, records))))
        while data:  # a regular file may take a part, as when the disk becomes full
            data = data[self._file.write(data) :]

    def finish(self, data: bytes) -> None:
        """Write the target as a whole, and remove the file of the parts."""
        target = self._target.resolve()
        new = target.with_name(f"{target.name}.new")
        new.write_bytes(data)
        new.replace(target)
        self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not self.done:  # nothing to continue
            self._path.unlink(missing_ok=True)
        self._file.close()


def to_bytes(lines: Sequence[str]) -> bytes:
    return "".join([f"{line}\n" for line in lines]).encode()
