import re
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from sightline.loadtest.compare import Change
from sightline.loadtest.load import Measurement
from sightline.loadtest.load_record import LoadRecord, make_record, read_record, write_record
from sightline.loadtest.outcome import Failure, Outcome, Rejection, Success
from sightline.loadtest.plots import Line, line_plot
from sightline.loadtest.profiles import Stage
from sightline.loadtest.report_page import write_page

VOID = {"meta"}


def curves(svg: str) -> list[list[tuple[str, float, float]]]:
    """Return the commands of each line of a plot, without the lines of the legend."""
    paths = [one for one in ElementTree.fromstring(svg) if one.get("class", "").startswith("line ")]
    commands = [re.findall(r"([ML])([\d.]+) ([\d.]+)", path.get("d", "")) for path in paths]
    return [
        [(letter, float(left), float(top)) for letter, left, top in one]
        for one, path in zip(commands, paths, strict=True)
        if "h30" not in path.get("d", "")
    ]


def test_a_line_goes_through_its_points_at_their_places_on_the_axes() -> None:
    (((_, x0, y0), (_, x1, y1), (_, x2, y2)),) = curves(
        line_plot("t", "x", "y", [Line("a", [(0, 0), (5, 50), (10, 100)])])
    )
    assert (x1 - x0, y0 - y1) == pytest.approx((x2 - x1, y1 - y2), abs=0.2)
    assert x0 < x1 and y0 > y1


def test_equal_ratios_are_equal_distances_on_a_logarithmic_axis() -> None:
    ((_, *one), (_, *two), (_, *three)) = curves(
        line_plot("t", "x", "y", [Line("a", [(1, 2), (10, 20), (100, 200)])], log_x=True, log_y=True)
    )[0]
    assert [b - a for a, b in zip(one, two, strict=True)] == pytest.approx(
        [b - a for a, b in zip(two, three, strict=True)], abs=0.2
    )


def test_a_missing_value_is_a_gap() -> None:
    (line,) = curves(line_plot("t", "x", "y", [Line("a", [(0, 1), (1, None), (2, 3), (3, 4)])]))
    assert [letter for letter, _, _ in line] == ["M", "M", "L"]


@pytest.mark.parametrize("points", [[(0.0, 0.0)], [(3.0, 7.0)], []])
@pytest.mark.parametrize("is_log", [False, True])
def test_few_points_make_a_valid_plot(points: list[tuple[float, float | None]], is_log: bool) -> None:
    svg = line_plot("a < b", "x", "y", [Line("<&>", points)], log_x=is_log, log_y=is_log)
    root = ElementTree.fromstring(svg)
    assert root.get("aria-label") == "a < b"
    assert "nan" not in svg


def test_ticks_are_round_numbers() -> None:
    svg = line_plot("t", "x", "y", [Line("a", [(0, 0), (340, 0.07)])])
    texts = [one.text for one in ElementTree.fromstring(svg) if one.tag == "text"]
    assert {"0", "100", "200", "300", "0.02", "0.04", "0.06"} <= set(texts)


class Checker(HTMLParser):
    """Checks that all elements are closed, and collects the addresses of other files."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag


def measurement(outcomes: list[Outcome], lag_s: float = 0.001) -> Measurement:
    return Measurement(outcomes, 10.0, [10 * index / len(outcomes) for index in range(len(outcomes))], [lag_s])


SUCCESSES: list[Outcome] = [Success(round(0.1 + index / 1000, 3), 0.05, 7, 5, 0.03) for index in range(100)]
ERRORS: list[Outcome] = [Rejection("over<loaded", 1), Failure("timeout"), Failure("timeout")]


def record_of(*measurements: Measurement, rates: bool) -> LoadRecord:
    arguments = {"url": "http://<host>", "endpoint": "generate", "objectives": {"latency": 0.15}, "max_lag": 0.025}
    stages = [Stage(10.0 * (1 + i) if rates else None, 10.0 * i, one) for i, one in enumerate(measurements)]
    return make_record(arguments, datetime(2026, 11, 25, 12, 0, tzinfo=UTC), 0.2, stages)


def check_page(record: LoadRecord, path: Path, changes: tuple[Change, ...] = ()) -> str:
    write_page(record, changes, 0.05, path)
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert (checker.stack, checker.links) == ([], [])
    assert "script" not in checker.tags and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text
    return text


def test_the_page_of_a_sweep_has_plots_over_the_rate_and_over_time(tmp_path: Path) -> None:
    record = record_of(measurement(SUCCESSES), measurement(SUCCESSES[:50] + ERRORS), rates=True)
    text = check_page(record, tmp_path / "page.html")
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles == [
        "Goodput over rate",
        "Latency over rate",
        "Time to first token over rate",
        "Latency over time",
        "Requests and errors over time",
        "Distribution at 10 requests/s",
        "Figures",
        "Errors",
        "Definitions",
        "Arguments and versions",
    ]
    assert "<td>failed: timeout</td><td>2</td>" in text and "<td>rejected: over&lt;loaded</td><td>1</td>" in text
    assert "<strong>5.1 good requests/s</strong> at 10 requests/s, 51.0% of the requests" in text
    assert "a request is good if it succeeds with latency ≤ 150 ms." in text.lower()
    assert "<td>20</td><td>53</td><td>1</td><td>2</td><td>94.3%</td>" in text
    over_time = re.findall("<svg.*?</svg>", text)[4]
    assert [label in over_time for label in (">good<", ">objective missed<", ">rejected<", ">failed<")] == [True] * 4


def test_the_page_of_one_load_has_no_plots_over_the_rate(tmp_path: Path) -> None:
    text = check_page(record_of(measurement(SUCCESSES[:50]), rates=False), tmp_path / "page.html")
    assert "over rate" not in text and "<td>closed loop</td>" in text and "<h2>Errors" not in text
    over_time = re.findall("<svg.*?</svg>", text)[1]
    assert ">good<" in over_time and ">failed<" not in over_time


def test_the_page_of_a_soak_has_its_changes(tmp_path: Path) -> None:
    change = Change(10.0, "latency p50, ms", 100.0, 130.0, 0.2, 0.4, is_worse_higher=True)
    text = check_page(record_of(measurement(SUCCESSES), rates=True), tmp_path / "page.html", (change,))
    assert "<td>+20.0% to +40.0%</td><td>worse</td>" in text


def test_a_page_without_a_success_and_of_an_invalid_run(tmp_path: Path) -> None:
    record = record_of(measurement([Failure("timeout")] * 9, lag_s=0.03), rates=False)
    text = check_page(record, tmp_path / "page.html")
    assert "This run is invalid" in text and "Distribution" not in text
    assert "This run is invalid" not in check_page(record_of(measurement(ERRORS), rates=False), tmp_path / "page.html")


def test_a_record_reads_as_it_was_written(tmp_path: Path) -> None:
    record = record_of(measurement([*SUCCESSES, *ERRORS]), rates=False)
    write_record(record, tmp_path / "load.json")
    read = read_record(tmp_path / "load.json")
    assert read == record
    (stage,) = read.stages
    outcomes = stage.measurement().outcomes
    assert [type(one) for one in outcomes] == [type(one) for one in (*SUCCESSES, *ERRORS)]
    assert outcomes[7] == SUCCESSES[7] and outcomes[-3:] == [Rejection("over<loaded", None), *ERRORS[1:]]
