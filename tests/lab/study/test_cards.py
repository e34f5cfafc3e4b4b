from pathlib import Path

import pytest

from lab.bench.record import read_results
from lab.study.__main__ import RESULTS
from lab.study.cards import CARD, card
from lab.zoo.systems import SYSTEMS, bundle_name
from sightline.base.bundle_files import read_manifest

BUNDLES = Path("bundles")


@pytest.mark.parametrize("name", [name for name in SYSTEMS if (BUNDLES / bundle_name(name)).is_dir()])
def test_the_repositorys_cards_are_up_to_date(name: str) -> None:
    folder = BUNDLES / bundle_name(name)
    assert (folder / CARD).read_text(encoding="utf-8") == card(name, read_manifest(folder), read_results(RESULTS))
