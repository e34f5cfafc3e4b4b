from pathlib import Path

from lab.bench.plots import draw
from lab.bench.record import RESULTS as RECORDED
from lab.bench.record import read_results


def test_the_committed_pictures_are_those_of_the_committed_results(tmp_path: Path) -> None:
    draw(read_results(RECORDED), tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in RECORDED.glob("*.svg")}
