"""Output of a translation: standard output, or a file that a later run can continue."""

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from sightline.base.errors import UsageError


class OutputError(UsageError):
    """A file that exists and cannot be continued; the message names it and the way out."""


class OutputBusyError(Exception):
    """A file that another process writes; the message names it and the way out."""


class StreamOutput:
    """Writes lines to standard output, a device or a pipe."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.num_done = 0  # lines that are written already

    def write(self, lines: Sequence[str]) -> None:
        self._stream.write(to_bytes(lines))
        self._stream.flush()
        self.num_done += len(lines)


class OutputFile:
    """Appends lines to a file that a later run can continue if this process is killed.

    Until the file is finished, a second file beside it, `NAME.progress`, records the source, the
    model and the options. A run with other values does not continue the file.
    """

    def __init__(self, path: Path, inputs: Mapping[str, Any]) -> None:
        """Open or continue a file, whose lines depend on nothing but `inputs`.

        Raises `OSError`, `OutputBusyError` if another process writes the file, or `OutputError` if
        it was begun with other inputs or is finished already.
        """
        self._path, self._progress = path, path.with_name(f"{path.name}.progress")
        self._inputs = dict(inputs)
        self.num_done = 0
        self._is_new = not os.path.lexists(path)  # only a new file may be removed again
        self._file = _open_locked(path)
        try:
            if os.fstat(self._file.fileno()).st_size == 0:
                self._record_inputs()
            else:
                self._check_inputs()
                self._drop_incomplete_line()
        except BaseException:
            self._file.close()
            raise

    def _record_inputs(self) -> None:
        partial = self._progress.with_name(f"{self._progress.name}.new")
        try:
            partial.write_text(json.dumps(self._inputs, indent=2) + "\n", encoding="utf-8")
            partial.replace(self._progress)
        except OSError:
            self._remove()
            raise

    def _remove(self) -> None:
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def _check_inputs(self) -> None:
        try:
            begun = json.loads(self._progress.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise OutputError(
                f"{self._path} exists and is no unfinished translation; remove it or choose another --out"
            ) from None
        except (OSError, ValueError) as error:
            raise OutputError(f"{self._progress} cannot be read: {error}; remove {self._path} to start again") from None
        changed = [name for name, value in self._inputs.items() if begun.get(name) != value]
        if changed:
            raise OutputError(
                f"{self._path} was begun with another {' and '.join(changed)}; remove it to start again, or choose "
                "another --out"
            )

    def _drop_incomplete_line(self) -> None:
        """Cut the file after its last line end and count its lines."""
        self._file.seek(0)
        end = size = 0
        while block := self._file.read(1 << 20):
            self.num_done += block.count(b"\n")
            if b"\n" in block:
                end = size + block.rindex(b"\n") + 1
            size += len(block)
        self._file.truncate(end)

    def write(self, lines: Sequence[str]) -> None:
        data = memoryview(to_bytes(lines))
        while data:  # a regular file may take a part, as when the disk becomes full
            data = data[self._file.write(data) :]
        self.num_done += len(lines)

    def finish(self) -> None:
        """Mark the file as complete."""
        os.fsync(self._file.fileno())
        self._progress.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, Exception) and self.num_done == 0:  # nothing to continue
            # The file is removed last: until then, no other process can begin a file of this name.
            self._progress.unlink(missing_ok=True)
            self._remove()
        self._file.close()


TranslationOutput = StreamOutput | OutputFile


def _open_locked(path: Path) -> FileIO:
    """Open a file for appending and lock it; only the process with the lock may change the file or
    its record. Raises `OSError`, or `OutputBusyError` if another process has the lock.
    """
    while True:
        file = path.open("ab+", buffering=0)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            raise OutputBusyError(f"{path} is being written by another process; choose another --out") from None
        # A process that has failed may have removed the file after it was opened here.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


def to_bytes(lines: Sequence[str]) -> bytes:
    return "".join([f"{line}\n" for line in lines]).encode()
