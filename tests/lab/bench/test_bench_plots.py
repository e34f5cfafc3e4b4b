from pathlib import Path

from lab.bench.plots import draw
from lab.bench.record import RESULTS as RECORDED
from lab.bench.record import Figure, Recorded, Result, read_results
from tests.support.steps import drawn_texts

FIGURES = {"shipped.greedy.16.requests/s.ctranslate2": 1.37, "library.greedy.1.best": 3.3, "firefox.greedy.1.CPU ms": 2}
RESULTS = {"shipped": Recorded({}, "", Result({name: Figure.of([value]) for name, value in FIGURES.items()}))}


def test_the_picture_shows_each_measured_ratio_with_a_target_and_is_the_same_for_the_same_results(
    tmp_path: Path,
) -> None:
    texts = drawn_texts(draw, RESULTS, tmp_path / "peers.svg")
    assert {"1.37", "3.30", "shipped model, greedy, over CTranslate2, requests/s at 16 clients"} <= texts
    assert not [text for text in texts if "Firefox" in text or "at 64 clients" in text]


def test_the_committed_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    draw(read_results(RECORDED), tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in RECORDED.glob("*.svg")}


def test_no_picture_is_written_without_results(tmp_path: Path) -> None:
    draw({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
