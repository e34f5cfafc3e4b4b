"""Pictures as SVG: well-formed, complete, and with marks as strong as the weights."""

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from sightline.service.drawing import (
    CELL_LIMITS,
    LABEL_INTERVAL,
    Matrix,
    alignment,
    colour_of,
    heads,
    heat_map,
    label_width,
)

SVG = "{http://www.w3.org/2000/svg}"
ROWS, COLUMNS = ["Ein", "Hund", "<s>"], ["A", "dog & cat", "犬", "</s>"]
WEIGHTS = np.array([[0.9, 0.05, 0.05, 0], [0.01, 0.5, 0.49, 0], [0.25, 0.25, 0.25, 0.25]], np.float32)
MATRIX = Matrix("A title <&>", ROWS, COLUMNS, WEIGHTS)


def parse(svg: str) -> ElementTree.Element:
    root = ElementTree.fromstring(svg)
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    assert (float(root.attrib["width"]), float(root.attrib["height"])) == (width, height)
    for element in root.iter(f"{SVG}text"):
        if "x" in element.attrib:
            assert 0 <= float(element.attrib["x"]) <= width and 0 <= float(element.attrib["y"]) <= height
    return root


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def test_a_heat_map_has_all_labels_and_the_weights_in_percent() -> None:
    root = parse(heat_map(MATRIX))
    shown = texts(root)
    assert [MATRIX.title, *ROWS, *COLUMNS] == shown[: 1 + len(ROWS) + len(COLUMNS)]
    assert shown[1 + len(ROWS) + len(COLUMNS) :] == ["90", "5", "5", "50", "49", "25", "25", "25", "25"]
    cells = list(root.iter(f"{SVG}rect"))[1:]  # after the background
    assert len(cells) == WEIGHTS.size
    darkness = np.array([-sum(bytes.fromhex(cell.attrib["fill"][1:])) for cell in cells])
    order = np.argsort(WEIGHTS.reshape(-1), kind="stable")
    assert (np.diff(darkness[order]) >= 0).all()


@pytest.mark.parametrize("size", [1, CELL_LIMITS[0], CELL_LIMITS[0] + 1, CELL_LIMITS[1], CELL_LIMITS[1] + 1])
def test_larger_maps_lose_numbers_then_most_labels(size: int) -> None:
    matrix = Matrix("", ["r"] * size, ["c"] * size, np.eye(size, dtype=np.float32))
    shown = texts(parse(heat_map(matrix)))
    assert ("100" in shown) == (size <= CELL_LIMITS[0])
    num_labels = size if size <= CELL_LIMITS[1] else -(-size // LABEL_INTERVAL)
    assert shown.count("r") == shown.count("c") == num_labels


def test_cells_of_one_shade_are_one_path_with_a_square_for_each() -> None:
    size = CELL_LIMITS[1] + 1
    weights = np.zeros((size, size), np.float32)
    weights[3, 5] = weights[7, 0] = 1
    root = parse(heat_map(Matrix("", ["r"] * size, ["c"] * size, weights)))
    (path,) = root.iter(f"{SVG}path")
    assert re.findall(r"M(\d+) (\d+)", path.attrib["d"]) == [("5", "3"), ("0", "7")]


def test_an_alignment_has_a_line_for_each_visible_weight_with_its_strength() -> None:
    root = parse(alignment(MATRIX))
    assert {"attends", "attended to", *ROWS, *COLUMNS} <= set(texts(root))
    lines = list(root.iter(f"{SVG}path"))
    threshold = 0.02 * WEIGHTS.max()
    strong = WEIGHTS[threshold <= WEIGHTS]
    assert len(lines) == len(strong)
    widths = [float(line.attrib["stroke-width"]) for line in lines]
    np.testing.assert_array_equal(np.argsort(widths, kind="stable"), np.argsort(strong, kind="stable"))


def test_a_grid_has_a_map_for_each_head() -> None:
    root = parse(heads("All", (1, 3), (0, 2), np.stack([[WEIGHTS] * 2] * 2)))
    assert texts(root) == ["All", "head 0", "head 2", "layer 1", "layer 3"]
    assert len(list(root.iter(f"{SVG}g"))) == 4


def test_negative_weights_are_drawn_by_their_magnitude() -> None:
    weights = np.array([[-1.0, 0.5]], np.float32)
    shown = texts(parse(heat_map(Matrix("", ["r"], ["a", "b"], weights))))
    assert shown[-2:] == ["-100", "50"]


def test_labels_without_a_form_in_xml_are_replaced() -> None:
    shown = texts(parse(heat_map(Matrix("", ["\x16", "\x00a"], ["\ufffe"], np.ones((2, 1), np.float32)))))
    assert shown[1:4] == ["\ufffd", "\ufffda", "\ufffd"]


def test_colours_darken_evenly_and_stay_in_range() -> None:
    sums = [sum(colour_of(share)) for share in np.linspace(-0.1, 1.1, 50)]
    assert sums == sorted(sums, reverse=True)
    assert (colour_of(0), colour_of(1)) == ((255, 255, 255), (3, 38, 79))


def test_wide_characters_use_more_width() -> None:
    assert label_width("犬犬") > label_width("do") > 0


def test_each_row_of_an_alignment_names_its_largest_weights() -> None:
    root = parse(alignment(MATRIX))
    rows = [group for group in root.iter(f"{SVG}g") if group.get("class") == "attends"]
    assert [len(list(row.iter(f"{SVG}path"))) for row in rows] == [3, 2, 4]
    titles = [row.findtext(f"{SVG}title") for row in rows]
    assert titles[0] == "Ein attends to A 90%, dog & cat 5%, 犬 5%"
    assert titles[1] == "Hund attends to dog & cat 50%, 犬 49%, A 1%"
