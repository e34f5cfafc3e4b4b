from pathlib import Path

from lab.bench.record import Recorded, Result, read_results, write_result


def test_lists_of_numbers_are_written_on_one_line_and_text_is_unchanged(tmp_path: Path) -> None:
    row = {"counts": [1, -2.5, 3e-7], "nested": [[1, 2], [3]], "text": ["[ 1, 2 ]", "[\n 1\n]", "[", "]"], "none": []}
    recorded = Recorded({"processor": "a [\n 1,\n 2\n]"}, "python -m lab.bench", Result(rows=(row,)))
    write_result(tmp_path, "step", recorded)
    assert '"counts": [1, -2.5, 3e-07]' in (tmp_path / "step.json").read_text(encoding="utf-8")
    assert read_results(tmp_path) == {"step": recorded}


def test_results_in_subfolders_are_not_read(tmp_path: Path) -> None:
    write_result(tmp_path / "reliability", "step", Recorded({}, "", Result()))
    assert read_results(tmp_path) == {}
