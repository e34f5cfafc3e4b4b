"""API keys: a file with the hash, label and role of each key.

Keys are long and random, so that SHA-256 is a safe hash: nobody can try all keys, unlike passwords.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sightline.base.errors import CommandError

Role = Literal["use", "admin"]
KEY_PREFIX = "sl-"  # so that people and tools recognize a key
KEY_BYTES = 32  # random bytes of a key
NEW_FILE_MODE = 0o600
# Errors of a file that cannot be replaced although it may be writable: it is mounted, or its folder
# is read-only or of another user.
IN_PLACE = (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV)
logger = logging.getLogger(__name__)


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Quota(_Strict):
    """Limits of the use of one key; None for no limit."""

    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None  # of inputs and outputs together
    concurrent_sequences: Annotated[int, Field(ge=1)] | None = None  # in progress at the same time


class Key(_Strict):
    """A key as the file has it."""

    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    role: Role = "use"
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    quota: Quota | None = None


class _KeyFile(_Strict):
    keys: tuple[Any, ...] = ()


class KeyRing:
    """The keys of a file, which is read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = _digest_of(path)
        self._by_hash = _by_hash(read_keys(path))

    def find(self, secret: bytes) -> Key | None:
        """Return a key by its text; None if there is none.

        The duration depends only on hashes, from which nothing about a key can be learned.
        """
        return self._by_hash.get(sha256(secret).hexdigest())

    def reload(self) -> None:
        """Read the file if its content has changed. If it is not valid, the former keys stay.

        It may run in another thread than `find`.
        """
        digest = _digest_of(self._path)
        if digest == self._digest:
            return
        self._digest = digest
        if digest == REPLACED:
            logger.error(
                "%s is mounted alone and was replaced outside: changes of its keys are not seen any more; mount the "
                "folder of the file instead, and restart the service",
                self._path,
            )
            return
        try:
            self._by_hash = _by_hash(read_keys(self._path))
        except CommandError as error:
            logger.error("the keys stay as they were: %s", error)
        else:
            logger.info("read the keys again", extra={"fields": {"keys": len(self._by_hash)}})


REPLACED = b""  # in place of the digest of a mounted file that has no name any more where it was


def _digest_of(path: Path) -> bytes | None:
    """Return the digest of a file, as size and times may not show a change; None if unreadable."""
    try:
        return sha256(path.read_bytes()).digest() if path.stat().st_nlink else REPLACED
    except OSError:
        return None


def _by_hash(keys: Sequence[Key]) -> dict[str, Key]:
    return {key.sha256: key for key in keys}


def read_keys(path: Path) -> Sequence[Key]:
    """Read a file of keys. Raises `CommandError` if it cannot be read or is not valid."""
    try:
        content = path.read_bytes()
    except OSError as error:
        advice = "`sightline keys add` writes it"
        if isinstance(error, PermissionError):
            advice = f"this process is user {os.geteuid()}: make it the owner of the file with `chown`"
        raise CommandError(f"the file of keys {path} cannot be read: {error.strerror}; {advice}") from None
    keys, loc = list[Key](), tuple[int | str, ...]()
    try:
        # The reader calls a Python function for each object, and keys are validated one by one, so
        # that other threads have their turn while many keys are read.
        for entry in _KeyFile.model_validate(json.loads(content, object_hook=lambda entry: entry)).keys:
            loc = "keys", len(keys)
            keys.append(Key.model_validate(entry))
    except ValidationError as error:
        first = error.errors(include_input=False)[0]  # a value may be a key that was written by mistake
        place = ".".join(map(str, (*loc, *first["loc"])))
        raise CommandError(f"{path} is not a file of keys: {place + ': ' if place else ''}{first['msg']}") from None
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not a file of keys: it is not JSON: {error}") from None
    for name in ("label", "sha256"):
        for value, count in Counter(getattr(key, name) for key in keys).items():
            if count > 1:
                raise CommandError(f"{path} has {count} keys with the {name} {value}; keep one of them")
    return keys


def add_key(path: Path, label: str, role: Role, quota: Quota | None = None) -> str:
    """Add a key to a file, which is created if it does not exist, and return the key.

    Raises `CommandError` if the label is not valid or is in use, or the file cannot be used.
    """
    secret = KEY_PREFIX + secrets.token_urlsafe(KEY_BYTES)
    try:
        key = Key(label=label, role=role, sha256=sha256(secret.encode()).hexdigest(), quota=quota)
    except ValidationError:
        raise CommandError(
            f"a label has 1 to 64 letters, digits, dots, hyphens or underscores, and begins with a letter or digit; "
            f"got {label!r}"
        ) from None
    with _changing(path) as keys:
        if any(existing.label == label for existing in keys):
            raise CommandError(
                f"{path} already has a key with the label {label}; remove it first, or use another label"
            )
        keys.append(key)
    return secret


def remove_key(path: Path, label: str) -> None:
    """Remove a key from a file. Raises `CommandError` if it has no such key, or cannot be used."""
    with _changing(path) as keys:
        kept = [key for key in keys if key.label != label]
        if len(kept) == len(keys):
            raise CommandError(f"{path} has no key with the label {label}; `sightline keys list` shows the labels")
        keys[:] = kept


@contextmanager
def _changing(path: Path) -> Iterator[list[Key]]:
    """Yield the keys of a file as a list, and replace the file by the changed list.

    A process that reads the file at the same time sees the old or the new one. Changes wait for
    each other.
    """
    path = path.resolve()
    try:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            keys = list(read_keys(path)) if path.exists() else []
            yield keys
            _replace(path, _KeyFile(keys=tuple(keys)).model_dump_json(indent=1, exclude_none=True).encode() + b"\n")
        finally:
            os.close(folder)
    except OSError as error:
        raise CommandError(f"the file of keys {path} cannot be written: {error.strerror}") from None


def _replace(path: Path, content: bytes) -> None:
    """Write a file as a whole; it keeps its mode and its owner.

    If it is mounted alone, or if only its content may be changed, it is written in place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, NEW_FILE_MODE), "wb") as file:
            if path.exists():
                former = path.stat()
                os.fchown(file.fileno(), former.st_uid, former.st_gid)
                os.fchmod(file.fileno(), former.st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if error.errno not in IN_PLACE or not path.exists():
            raise
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, len(content))  # a full disk fails before anything is written
            file.write(content)
            file.truncate()
    finally:
        temporary.unlink(missing_ok=True)
