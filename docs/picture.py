"""Draw the cross-attention of one sentence as an SVG, from the maps that a running service returns.

`python -m docs.picture SENTENCE --out FILE` prints the translation and writes the picture. It needs
only the standard library. This command wrote `docs/images/attention.svg`, the picture at the top of
the README.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

CELL_WIDTH, CELL_HEIGHT, GAP = 46, 26, 2  # pixels
LABEL_WIDTH, LABEL_HEIGHT, MARGIN = 92, 74, 12
MIN_NUMBER = 10  # percent; smaller weights are shown by colour only
DARK = 45  # percent; numbers in darker cells are white
COLOUR = "#0b4f8a"
GAMMA = 0.7  # below 1, so that small weights stay visible


def read_map(url: str, sentence: str, model: str | None = None, layer: int | None = None) -> dict[str, Any]:
    """Request the cross-attention of a sentence, averaged over the heads of each layer.

    Args:
        url: address of the service.
        sentence: source text.
        model: name of a model; the default model if absent.
        layer: index of the only layer to return; all layers if absent.

    Returns:
        The output of `/v1/attention` for the sentence.

    Raises:
        HTTPError: the service returned an error.
        URLError: there is no service at `url`.
    """
    body: dict[str, Any] = {"model": model, "inputs": sentence, "kinds": ["cross"], "reduce": "mean"}
    if layer is not None:
        body["layers"] = [layer]
    data = json.dumps(body).encode()
    request = Request(f"{url}/v1/attention", data, {"Content-Type": "application/json"})  # noqa: S310
    with urlopen(request, timeout=30) as response:  # noqa: S310
        output: dict[str, Any] = json.load(response)["outputs"][0]
    return output


def last_layer(result: dict[str, Any]) -> list[list[float]]:
    """Return the weights of the last layer in a response as a list of rows."""
    attention = result["maps"][0]
    rows, columns = attention["rows"], attention["columns"]
    weights = attention["data"][-rows * columns :]
    return [weights[row * columns : (row + 1) * columns] for row in range(rows)]


def draw(result: dict[str, Any]) -> str:
    """Return the SVG of a response: a row for each target token, a column for each source token."""
    weights = last_layer(result)
    width = 2 * MARGIN + LABEL_WIDTH + CELL_WIDTH * len(weights[0])
    height = 2 * MARGIN + LABEL_HEIGHT + CELL_HEIGHT * len(weights)
    origin = f"translate({MARGIN + LABEL_WIDTH} {MARGIN + LABEL_HEIGHT})"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="DejaVu Sans, Verdana, Arial, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<g transform="{origin}">',
        *_labels(result),
        *_cells(weights),
        "</g>",
        "</svg>\n",
    ]
    return "\n".join(parts)


def _labels(result: dict[str, Any]) -> Iterator[str]:
    for row, token in enumerate(result["target_tokens"]):
        y = (row + 0.68) * CELL_HEIGHT
        yield f'<text x="-8" y="{y:g}" text-anchor="end" font-weight="bold">{escape(token.strip())}</text>'
    for column, token in enumerate(result["source_tokens"]):
        x = (column + 0.6) * CELL_WIDTH
        yield f'<text transform="translate({x:g} -8) rotate(-45)">{escape(token.strip())}</text>'


def _cells(weights: Sequence[Sequence[float]]) -> Iterator[str]:
    for row, columns in enumerate(weights):
        for column, weight in enumerate(columns):
            percent = round(100 * weight)
            x, y = column * CELL_WIDTH, row * CELL_HEIGHT
            opacity = max(0.04, min(1.0, abs(weight)) ** GAMMA)
            yield (
                f'<rect x="{x + GAP / 2:g}" y="{y + GAP / 2:g}" width="{CELL_WIDTH - GAP}" '
                f'height="{CELL_HEIGHT - GAP}" rx="3" fill="{COLOUR}" fill-opacity="{opacity:.2f}"/>'
            )
            if percent >= MIN_NUMBER:
                fill = "white" if percent > DARK else "#222"
                yield (
                    f'<text x="{x + CELL_WIDTH / 2:g}" y="{y + 0.68 * CELL_HEIGHT:g}" text-anchor="middle" '
                    f'font-size="11" fill="{fill}">{percent}</text>'
                )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.picture", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("sentence", help="source text")
    parser.add_argument("--out", type=Path, required=True, help="SVG file to write")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the service (default: %(default)s)")
    parser.add_argument("--model", help="name of a model with cross-attention (default: the service's default model)")
    parser.add_argument("--layer", type=int, help="number of a layer, counted from 0 (default: the last)")
    parsed = parser.parse_args(arguments)
    try:
        result = read_map(parsed.url, parsed.sentence, parsed.model, parsed.layer)
    except HTTPError as error:
        print(f"error: {json.load(error)['error']['message']}", file=sys.stderr)
        return 1
    except URLError as error:
        print(f"error: no service at {parsed.url} ({error.reason}); start one with `make serve`", file=sys.stderr)
        return 1
    parsed.out.write_text(draw(result), encoding="utf-8")
    print(result["text"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
