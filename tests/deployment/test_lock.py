"""Tests that the requirements of the images agree with pyproject.toml and the constraints."""

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deployment.lock import EARLIER_PYTHON, IMAGES, Image, differences, lock, normalized, read_pins, requirements

CPU, GPU = IMAGES


def installed_closure() -> set[str]:
    """Return the names of all packages that the service's requirements need, as they are installed
    here.
    """
    found: set[str] = set()
    waiting = [Requirement(text) for text in requirements("cpu") if text not in EARLIER_PYTHON]
    while waiting:
        requirement = waiting.pop()
        name = normalized(requirement.name)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and name not in found:
            found.add(name)
            waiting += [Requirement(text) for text in requires(requirement.name) or ()]
    return found


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.runtime)
def test_every_package_of_an_image_is_locked_in_the_pinned_version(image: Image) -> None:
    assert differences(read_pins([image.lock]), read_pins(image.constraints)) == [], "run: make lock"


def test_the_locked_packages_are_those_that_the_service_needs() -> None:
    locked = read_pins([CPU.lock]).keys()
    earlier = {normalized(Requirement(text).name) for text in EARLIER_PYTHON}  # not needed by the Python here
    assert locked == installed_closure() | earlier, "run: make lock"
    pinned_libraries = read_pins([Path("constraints-gpu.txt")]).keys()  # of CUDA, which are not installed here
    assert read_pins([GPU.lock]).keys() == locked - {"onnxruntime"} | {"onnxruntime-gpu"} | pinned_libraries


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.runtime)
def test_every_locked_package_has_hashes(image: Image) -> None:
    text = image.lock.read_text(encoding="utf-8")
    assert text.startswith(image.head)
    packages = text.removeprefix(image.head).replace("\\\n", "").splitlines()
    assert packages
    assert all(re.fullmatch(r"\S+==\S+( +--hash=sha256:[0-9a-f]{64})+", entry) for entry in packages)


def test_wheels_of_several_machines_share_an_entry() -> None:
    def package(digest: str) -> dict[str, object]:
        archive = {"hashes": {"sha256": digest}}
        return {"metadata": {"name": "Some_Name", "version": "1.0"}, "download_info": {"archive_info": archive}}

    digests = ["b" * 64, "a" * 64]
    entry = lock(map(package, digests))
    assert (
        entry == "some-name==1.0 \\\n    " + " \\\n    ".join(f"--hash=sha256:{one}" for one in sorted(digests)) + "\n"
    )
    assert differences({"some-name": "1.0"}, {"some-name": "1.1"}) == ["some-name"]


def test_a_package_without_a_hash_is_rejected() -> None:
    with pytest.raises(ValueError, match="without a SHA-256"):
        lock([{"metadata": {"name": "a", "version": "1"}, "download_info": {"dir_info": {}}}])
