from pathlib import Path
from xml.etree import ElementTree

from bench.plots import draw
from bench.record import RESULTS as RECORDED
from bench.record import Figure, Recorded, Result, read_results

RATIOS = {
    f"library.tiny.{decoding}.{rows}.{types}": Figure.of([1.5])
    for decoding in ("greedy", "beam 5")
    for rows in (1, 8)
    for types in ("best", "float32")
}
SERVER_ROWS = [
    {"decoding": decoding, "load": load, "server": server, "requests_per_s": [100.0], "p99_ms": [9.0]}
    for decoding in ("greedy", "beam 5")
    for load in ("16 clients", "open 80 %")
    for server in ("sightline", "litserve", "fastapi")
]
RESULTS = {
    "library-tiny": Recorded({}, "", Result(RATIOS)),
    "server-tiny": Recorded({}, "", Result({}, SERVER_ROWS)),
}


def texts_in(picture: Path) -> set[str]:
    return {(element.text or "").strip() for element in ElementTree.parse(picture).iter()}


def test_the_pictures_show_every_case_and_server(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path)
    assert {"1", "8", "fastest data types, greedy", "1.5"} <= texts_in(tmp_path / "library.svg")
    assert {"16 clients", "80 %", "litserve", "requests/s"} <= texts_in(tmp_path / "servers.svg")


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    pictures = []
    for _ in range(2):
        draw(RESULTS, tmp_path)
        pictures.append([path.read_bytes() for path in sorted(tmp_path.iterdir())])
    assert pictures[0] == pictures[1]


def test_the_committed_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    draw(read_results(RECORDED), tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in RECORDED.glob("*.svg")}


def test_no_picture_is_written_without_results(tmp_path: Path) -> None:
    draw({}, tmp_path)
    assert list(tmp_path.iterdir()) == []
