"""Each section that needs no connection and no root measures small models."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench import servers, soak
from lab.bench.__main__ import ON_REQUEST, SECTIONS
from lab.bench.engine import start
from lab.bench.libraries import section
from lab.bench.options import Options
from lab.bench.peers import CTRANSLATE2, Setting
from lab.bench.record import Recorded
from lab.bench.reliability import overload
from lab.bench.report import section_table
from lab.bench.targets import RELIABILITY
from sightline.base.bundle import Coverage
from sightline.base.bundle_files import read_manifest, write_manifest

DOWNLOADS = ("minilm", "minilm-int8", "smollm2", "smollm2-int8", "prompts", "firefox")
NAMES = [name for name in SECTIONS if name not in (*DOWNLOADS, *ON_REQUEST)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    float32 = ([Setting("float32", ("--compute-type", "float32"))],)
    for module, name, value in (
        (overload, "HEAD_START_S", 0.2),
        (overload, "INPUTS", 4),
        (overload, "OVERLOADS", {3: 0.5, 10: 0.1}),
        (overload, "PEAK_CLIENTS", {"large": (1,), "single": (4, 16)}),
        (section, "COMPUTE_TYPES", ("float32", "int8")),
        (section, "INSTRUCTION_SETS", ("",)),
        (servers, "CTRANSLATE2", replace(CTRANSLATE2, axes=float32)),
        (soak, "AVERAGED", 1),
        (soak, "CLIENTS", 4),
        (soak, "READINGS", 3),
        (soak, "SETTLING_S", 0.5),
        (start, "REQUESTS", 64),
    ):
        monkeypatch.setattr(module, name, value)


@pytest.mark.parametrize("name", [*NAMES, "soak"])
@pytest.mark.usefixtures("this_environment")
def test_a_section_measures_its_figures_and_is_written_up(name: str, short: Options, tmp_path: Path) -> None:
    if name == "marks":  # the model of the tests has no head that shows omissions
        bundle = shutil.copytree(short.bundles, tmp_path / "bundles") / "toy"
        coverage = Coverage(layer=0, head=0, auroc=0.9, insertions=1, threshold=0.1)
        write_manifest(bundle, read_manifest(bundle).model_copy(update={"coverage": coverage}))
        short = replace(short, bundles=bundle.parent)
    result = SECTIONS[name](replace(short, minutes=1.5 / 60))
    assert all(len(figure.rounds) > 0 for figure in result.figures.values())
    assert not [failure for failure in result.failures if "growth" not in failure]
    wanted = {target.figure for target in RELIABILITY if target.section == name and "responses" not in target.figure}
    assert result.figures.keys() >= (wanted or {min(result.figures)})
    assert not result.rows or " | " in section_table(name, Recorded({"commit": None}, "", result))
