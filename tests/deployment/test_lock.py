"""Tests that the requirements of the image agree with pyproject.toml and constraints.txt."""

import hashlib
import re
from importlib.metadata import requires
from pathlib import Path

from packaging.requirements import Requirement

from tests.deployment.lock import LOCK, differences, lock, normalized, read_pins, requirements


def installed_closure() -> set[str]:
    """Return the names of all packages that the service's requirements need, as they are installed
    here.
    """
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements()]
    while waiting:
        requirement = waiting.pop()
        name = normalized(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in found:
            found.add(name)
            waiting += [Requirement(text) for text in requires(requirement.name) or ()]
    return found


def test_every_package_of_the_image_is_locked_in_the_pinned_version() -> None:
    locked = read_pins(LOCK)
    assert differences(locked, read_pins(Path("constraints.txt"))) == [], "run: make lock"
    assert locked.keys() == installed_closure(), "run: make lock"


def test_every_locked_package_has_hashes() -> None:
    entries = LOCK.read_text(encoding="utf-8").replace("\\\n", "").splitlines()
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert packages
    assert all(re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", entry) for entry in packages)


def test_wheels_of_several_machines_share_an_entry(tmp_path: Path) -> None:
    wheels = [tmp_path / f"Some_Name-1.0-cp311-cp311-{machine}.whl" for machine in ("x86_64", "aarch64")]
    for wheel in wheels:
        wheel.write_text(wheel.name, encoding="utf-8")
    digests = sorted(hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels)
    entry = "".join(lock(wheels).splitlines(keepends=True)[2:])
    assert entry == "some-name==1.0 \\\n    " + " \\\n    ".join(f"--hash=sha256:{one}" for one in digests) + "\n"
    assert differences({"some-name": "1.0"}, {"some-name": "1.1"}) == ["some-name"]
