from pathlib import Path
from xml.etree import ElementTree

from bench.plots import draw
from bench.record import RESULTS as RECORDED
from bench.record import Figure, Recorded, Result, read_results

FIGURES = {"shipped.greedy.16.requests/s.ctranslate2": 1.37, "library.greedy.1.best": 3.3, "firefox.greedy.1.CPU ms": 2}
RESULTS = {"shipped": Recorded({}, "", Result({name: Figure.of([value]) for name, value in FIGURES.items()}))}


def texts_in(picture: Path) -> set[str]:
    return {(element.text or "").strip() for element in ElementTree.parse(picture).iter()}


def test_the_picture_shows_each_measured_ratio_with_a_target(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path)
    texts = texts_in(tmp_path / "peers.svg")
    assert {"1.37", "3.30", "shipped model, greedy, over CTranslate2, requests/s at 16 clients"} <= texts
    assert not [text for text in texts if "Firefox" in text or "at 64 clients" in text]


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    pictures = []
    for _ in range(2):
        draw(RESULTS, tmp_path)
        pictures.append((tmp_path / "peers.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_the_committed_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    draw(read_results(RECORDED), tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in RECORDED.glob("*.svg")}


def test_no_picture_is_written_without_results(tmp_path: Path) -> None:
    draw({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
