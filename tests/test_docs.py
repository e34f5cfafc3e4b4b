"""The documents point to what exists."""

import re
from pathlib import Path

import pytest

DOCUMENTS = sorted([*Path().glob("*.md"), *Path("docs").rglob("*.md"), *Path("bundles").rglob("*.md")])
TARGETS = set(re.findall(r"^([a-z-]+):", Path("Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_lead_to_files_that_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    assert [link for link in links if not (document.parent / link).exists()] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_make_targets_that_are_named_exist(document: Path) -> None:
    named = set(re.findall(r"`(?:RUNTIME=gpu )?make ([a-z-]+)", document.read_text(encoding="utf-8")))
    assert named <= TARGETS


def test_every_target_is_phony_and_says_what_it_does() -> None:
    text = Path("Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.+)$", text, flags=re.MULTILINE)
    assert set(phony.split()) == TARGETS
    described = set(re.findall(r"^([a-z-]+):.*## \S", text, flags=re.MULTILINE))
    assert described == TARGETS


def test_the_decision_records_are_all_listed() -> None:
    records = {path.name for path in Path("docs/adr").glob("0*.md")}
    listed = set(re.findall(r"\((0[^)]+\.md)\)", Path("docs/adr/README.md").read_text(encoding="utf-8")))
    assert records == listed
