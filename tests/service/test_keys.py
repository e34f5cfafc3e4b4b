"""The file of API keys."""

import asyncio
import errno
import json
import logging
import os
import re
import shutil
import stat
import threading
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from sightline.base.errors import CommandError
from sightline.service.app import _follow
from sightline.service.http.access import authorize
from sightline.service.keys import KeyRing, Quota, add_key, read_keys, remove_key
from tests.service.conftest import until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_found_by_its_text_and_the_file_has_only_its_hash(path: Path) -> None:
    alice, boss = add_key(path, "alice", "use"), add_key(path, "boss", "admin")
    assert len(alice) == len("sl-") + 43 and alice.startswith("sl-") and alice != boss
    ring = KeyRing(path)
    found = [ring.find(secret.encode()) for secret in (alice, boss)]
    assert [(key.label, key.role) for key in found if key] == [("alice", "use"), ("boss", "admin")]
    content = path.read_text(encoding="utf-8")
    assert alice[3:] not in content and boss[3:] not in content
    for wrong in ("", "alice", alice[:-1], alice + " ", *(key.sha256 for key in read_keys(path))):
        assert ring.find(wrong.encode()) is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_check_takes_at_most_20_microseconds_with_a_thousand_keys(path: Path) -> None:
    secrets = [f"sl-{number:043}".encode() for number in range(1000)]
    keys = [{"label": f"key-{number}", "sha256": sha256(one).hexdigest()} for number, one in enumerate(secrets)]
    path.write_text(json.dumps({"keys": keys}), encoding="utf-8")
    ring, seconds = KeyRing(path), []
    common = [(b"host", b"localhost:8000"), (b"user-agent", b"python"), (b"content-type", b"application/json")]
    requests = [[*common, (b"authorization", b"Bearer " + one), (b"content-length", b"60")] for one in secrets]

    def check(headers: list[tuple[bytes, bytes]]) -> str:
        """Find the key in the headers of a request, as for each call."""
        call: Any = SimpleNamespace(headers=dict(reversed(headers)), scope={"method": "POST"}, key=None)
        authorize(call, None, ring)
        label: str = call.caller
        return label

    for _ in range(5):
        started = time.process_time()
        labels = list(map(check, requests))
        seconds.append((time.process_time() - started) / len(secrets))
        assert labels == [key["label"] for key in keys]
    assert min(seconds) <= 20e-6, seconds


def test_a_changed_file_keeps_its_mode_and_is_replaced_as_a_whole(path: Path) -> None:
    add_key(path, "alice", "use")
    path.chmod(0o640)
    link = path.with_name("link.json")
    link.symlink_to(path)
    with path.open(encoding="utf-8") as reader:
        add_key(link, "bob", "use")
        assert len(json.load(reader)["keys"]) == 1  # a reader that has opened the old file reads it to its end
    assert [key.label for key in read_keys(path)] == ["alice", "bob"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and link.is_symlink()
    assert {one.name for one in path.parent.iterdir()} == {"keys.json", "link.json"}


def test_a_full_disk_leaves_the_former_keys(small_disk: Callable[[int], Path]) -> None:
    """The disk has space for one file, and a change writes a second one."""
    path = small_disk(4) / "keys.json"
    add_key(path, "alice", "use")
    with pytest.raises(CommandError, match=re.escape(f"{path} cannot be written: No space left on device")):
        add_key(path, "bob", "use")
    with pytest.raises(CommandError, match="No space left on device"):
        remove_key(path, "alice")
    assert [one.label for one in read_keys(path)] == ["alice"]
    assert list(path.parent.iterdir()) == [path]


def test_a_key_may_have_a_quota_and_only_limits_that_are_set_are_written(path: Path) -> None:
    quota = Quota(requests_per_minute=60, concurrent_sequences=2)
    add_key(path, "alice", "use", quota)
    add_key(path, "bob", "use")
    assert [key.quota for key in read_keys(path)] == [quota, None]
    written = [key.get("quota") for key in json.loads(path.read_text(encoding="utf-8"))["keys"]]
    assert written == [{"requests_per_minute": 60, "concurrent_sequences": 2}, None]
    path.write_text(path.read_text(encoding="utf-8").replace('minute": 60', 'minute": 0'), encoding="utf-8")
    with pytest.raises(CommandError, match=r"quota\.requests_per_minute"):
        read_keys(path)


def test_keys_that_are_added_at_the_same_time_are_all_kept(path: Path) -> None:
    threads = [threading.Thread(target=add_key, args=(path, f"key-{number}", "use")) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.label for key in read_keys(path)} == {f"key-{number}" for number in range(8)}


def test_a_removed_key_is_not_found_any_more(path: Path) -> None:
    alice, bob = add_key(path, "alice", "use"), add_key(path, "bob", "use")
    ring = KeyRing(path)
    remove_key(path, "alice")
    assert ring.find(alice.encode())  # until the file is read again
    ring.reload()
    assert ring.find(alice.encode()) is None and ring.find(bob.encode())


def test_a_changed_link_to_the_file_is_noticed(tmp_path: Path) -> None:
    """The kubelet writes a changed secret into a new folder and then changes a link to it."""
    first, second, data = tmp_path / "..first", tmp_path / "..second", tmp_path / "..data"
    first.mkdir()
    key = add_key(first / "keys.json", "alice", "use")
    data.symlink_to(first.name)
    (tmp_path / "keys.json").symlink_to("..data/keys.json")
    ring = KeyRing(tmp_path / "keys.json")
    shutil.copytree(first, second)
    new = add_key(second / "keys.json", "bob", "use")
    (tmp_path / "..next").symlink_to(second.name)
    (tmp_path / "..next").rename(data)
    assert ring.find(key.encode()) is not None and ring.find(new.encode()) is None
    ring.reload()
    assert ring.find(key.encode()) is not None and ring.find(new.encode()) is not None


@pytest.mark.parametrize("number", [errno.EBUSY, errno.EPERM, errno.EROFS])
def test_a_file_that_cannot_be_replaced_is_written_in_place_and_followed_by_its_content(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file that a container mounts alone, or whose folder is of another user."""
    alice, bob = add_key(path, "alice", "use"), add_key(path, "bobby", "use")
    ring, status = KeyRing(path), path.stat()

    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(number, os.strerror(number))))
    remove_key(path, "alice")
    new = add_key(path, "carol", "use")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    for name in ("st_ino", "st_size", "st_mtime_ns"):
        assert getattr(path.stat(), name) == getattr(status, name)
    ring.reload()
    assert [ring.find(key.encode()) is not None for key in (alice, bob, new)] == [False, True, True]
    assert list(path.parent.iterdir()) == [path]


def test_a_mounted_file_that_is_replaced_outside_is_an_error(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    alice = add_key(path, "alice", "use")
    with path.open("rb") as mounted:  # a name of the old file, as a mount has it
        ring = KeyRing(Path(f"/proc/self/fd/{mounted.fileno()}"))
        remove_key(path, "alice")
        for _ in range(2):
            ring.reload()
    assert ring.find(alice.encode())
    assert ["mount the folder of the file instead" in text for text in caplog.messages] == [True]


def test_a_file_that_the_user_of_the_service_cannot_read_says_who_that_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    with pytest.raises(
        CommandError, match=r"Permission denied; this process is user 10001: make it the owner .* `chown`"
    ):
        read_keys(path)


@pytest.mark.anyio
async def test_many_keys_are_read_while_the_event_loop_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_key(path, "alice", "use")
    ring, threads = KeyRing(path), list[int]()
    monkeypatch.setattr("sightline.service.app.WATCH_INTERVAL_S", 0.0)
    monkeypatch.setattr(ring, "reload", lambda: threads.append(threading.get_ident()))
    task = asyncio.create_task(_follow(ring))
    await until(lambda: bool(threads))
    task.cancel()
    assert threading.get_ident() not in threads


@pytest.mark.parametrize("content", [None, "", "{}x", '{"keys": 1}'])
def test_former_keys_stay_while_the_file_is_not_valid(
    path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    alice = add_key(path, "alice", "use")
    ring, valid = KeyRing(path), path.read_bytes()
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="utf-8")
    for _ in range(3):
        ring.reload()
    assert ring.find(alice.encode())
    (message,) = caplog.messages  # one for each change
    assert message.startswith("the keys stay as they were: ")
    path.write_bytes(valid)
    ring.reload()
    assert caplog.messages[1:] == ["read the keys again"]


KEY = {"label": "a", "role": "use", "sha256": "0" * 64}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "is not a file of keys: "),
        ({"keys": [{"label": "a"}]}, r"is not a file of keys: keys\.0\.sha256: Field required"),
        ({"keys": [KEY | {"label": "a b"}]}, r"keys\.0\.label: String should match pattern"),
        ({"keys": [KEY | {"role": "root"}]}, r"keys\.0\.role: Input should be 'use' or 'admin'"),
        ({"keys": [KEY | {"key": "sl-secret"}]}, r"keys\.0\.key: Extra inputs are not permitted"),
        ({"keys": [KEY | {"sha256": "sl-secret"}]}, r"keys\.0\.sha256: String should match pattern"),
        ({"keys": [KEY, KEY | {"sha256": "1" * 64}]}, "has 2 keys with the label a; keep one of them"),
        ({"keys": [KEY, KEY | {"label": "b"}]}, "has 2 keys with the sha256 0+; keep one of them"),
    ],
)
def test_an_invalid_file_is_refused_without_repeating_its_values(path: Path, content: Any, message: str) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CommandError, match=message) as caught:
        read_keys(path)
    assert "sl-secret" not in str(caught.value)


@pytest.mark.parametrize("label", ["", "a b", "-a", "ä", "a" * 65, "a\n"])
def test_a_label_that_logs_and_metrics_cannot_show_is_refused(path: Path, label: str) -> None:
    with pytest.raises(CommandError, match="a label has 1 to 64 letters"):
        add_key(path, label, "use")
    assert not path.exists()
