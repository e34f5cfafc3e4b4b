"""Files that are ZIP archives of others, with limits of what is unpacked."""

import io
import re
import zipfile
import zlib
from collections.abc import Mapping

from sightline.translation.files.document import MAX_PARTS, DocumentError


class Archive:
    """An archive in memory; nothing is written to a folder."""

    def __init__(self, data: bytes, max_unpacked_bytes: int) -> None:
        try:
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        except (zipfile.BadZipFile, ValueError, NotImplementedError, EOFError):
            raise DocumentError("is damaged, or no file of its format; save it again with its program") from None
        parts = self._zip.infolist()
        if len(parts) > MAX_PARTS:
            raise DocumentError(f"has {len(parts)} parts, more than {MAX_PARTS}; remove some")
        if sum(part.file_size for part in parts) > max_unpacked_bytes:
            raise DocumentError(f"has more than {max_unpacked_bytes // 2**20} MiB of content; make it smaller")
        if any(part.flag_bits & 1 for part in parts):
            raise DocumentError("has a password; remove the password")

    def names(self, pattern: str) -> list[str]:
        """Return the names of the parts that match a pattern as a whole."""
        return [name for name in dict.fromkeys(self._zip.namelist()) if re.fullmatch(pattern, name)]

    def read(self, name: str) -> bytes:
        try:
            return self._zip.read(name)
        except (zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError):
            raise DocumentError("is damaged; save it again with its program") from None

    def write(self, changed: Mapping[str, bytes]) -> bytes:
        """Return the archive with other contents of some parts, in the same order."""
        output = io.BytesIO()
        with zipfile.ZipFile(output, "w") as archive:
            for part in self._zip.infolist():
                copied = zipfile.ZipInfo(part.filename, part.date_time)
                copied.compress_type = part.compress_type
                copied.external_attr = part.external_attr
                archive.writestr(copied, changed.get(part.filename) or self.read(part.filename))
        return output.getvalue()
