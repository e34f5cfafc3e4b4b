"""Test if the attention of the pronoun "it" prefers the noun that it refers to, in pairs of
sentences that differ in one word.
"""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import pyplot
from numpy.typing import NDArray

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.bench.style import WIDTH, describe, save, style
from lab.study.bleu import mean_with_interval, percent
from lab.study.maps import Weights, array_of, draw_cells, rollout
from lab.study.runs import models_at_start, system_of
from lab.study.served import Served, serve
from sightline.base.text.words import merge_weights, words_of

NAME = "pronouns"
PRONOUN = "it"
LEAST_MOVE = 1e-4  # far above rounding; in the first layer, the last word of a sentence cannot move the attention
# Both nouns are in brackets. Of the last two words, the first makes "it" the first noun and the
# second makes it the second noun.
PAIRS = """
The [horse] does not jump over the [fence] because it is too <tired|high>.
The [ball] does not fit into the [bag] because it is too <big|small>.
The [truck] cannot drive under the [bridge] because it is too <tall|low>.
The [dog] cannot catch the [ball] because it is too <slow|fast>.
The [cat] runs away from the [dog] because it is <afraid|angry>.
The [bird] does not eat the [bread] because it is not <hungry|fresh>.
The [car] does not overtake the [truck] because it is too <slow|wide>.
The [table] does not fit through the [door] because it is too <wide|narrow>.
The [knife] does not cut the [rope] because it is too <blunt|thick>.
The [picture] does not fit into the [frame] because it is too <large|small>.
The [goat] climbs over the [wall] because it is <hungry|low>.
The [cow] eats the [grass] because it is <hungry|green>.
The [puppy] sleeps on the [blanket] because it is <tired|soft>.
The [cat] lies under the [tree] because it is <lazy|shady>.
The [bike] does not get through the [mud] because it is too <heavy|deep>.
The [lamp] does not light the [room] because it is too <weak|large>.
The [ladder] does not reach the [roof] because it is too <short|high>.
The [blanket] does not cover the [bed] because it is too <small|big>.
The [horse] does not pull the [wagon] because it is too <weak|heavy>.
The [dog] does not chew the [bone] because it is too <young|hard>.
The [duck] does not swim on the [pond] because it is <sick|frozen>.
The [snake] does not enter the [hole] because it is too <thick|narrow>.
The [kite] does not rise in the [wind] because it is too <heavy|weak>.
The [shirt] does not go into the [drawer] because it is <dirty|full>.
The [coat] stays out of the [closet] because it is <wet|full>.
The [train] does not stop at the [station] because it is <late|closed>.
The [bus] does not drive up the [hill] because it is too <full|steep>.
The [plane] does not land on the [field] because it is too <large|muddy>.
The [bear] leaves the [meat] because it is <sleepy|rotten>.
The [sheep] does not cross the [bridge] because it is <scared|broken>.
The [squirrel] drops the [nut] because it is <clumsy|hollow>.
The [monkey] throws away the [banana] because it is <angry|rotten>.
The [nail] does not go into the [board] because it is too <blunt|hard>.
The [chair] wobbles on the [floor] because it is <broken|uneven>.
The [dog] barks at the [car] because it is <nervous|loud>.
The [cat] sits beside the [stove] because it is <cold|warm>.
The [elephant] does not lift the [log] because it is too <lazy|heavy>.
The [sofa] does not go into the [elevator] because it is too <long|small>.
The [donkey] does not carry the [sack] because it is too <stubborn|heavy>.
The [rabbit] does not leave the [cage] because it is <ill|locked>.
""".strip().splitlines()


@dataclass(frozen=True)
class Pair:
    """Two sentences with the same two nouns; `it` is the first noun in the first sentence, and the
    second noun in the second sentence.
    """

    sentences: tuple[str, str]
    nouns: tuple[str, str]


def pair_of(line: str) -> Pair:
    first, second = re.findall(r"\[(\w+)\]", line)
    endings = re.search(r"<(\w+)\|(\w+)>", line)
    assert endings is not None, f"{line!r} has no pair of words"
    plain = re.sub(r"[\[\]]", "", line)
    one, other = (plain.replace(endings[0], ending) for ending in endings.groups())
    return Pair((one, other), (first, second))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "folders of bundles; models without maps of encoder self-attention between tokens are skipped"
    parser.add_argument("bundles", type=Path, nargs="+", help=text)


def measure(arguments: argparse.Namespace) -> Result:
    """Read the attention of the pronouns over the service's HTTP API.

    Raises:
        ValueError: The bundles cannot be served.
    """
    pairs = [pair_of(line) for line in PAIRS]
    rows: list[Row] = []
    for folder in arguments.bundles:
        with serve(folder) as served:
            for manifest in models_at_start(folder):
                if any(maps.kind == "encoder" and maps.normalized for maps in manifest.attention):
                    rows += summary(manifest.name, preferences(served, manifest.name, pairs))
    return Result(rows=rows)


def preferences(served: Served, model: str, pairs: Sequence[Pair]) -> Weights:
    """Return the difference of the weights from the pronoun to the two nouns, divided by their sum:
    1 if it attends only to the first one, -1 if only to the second one.

    Returns:
        (P, 2, L, H + 2): for each sentence of each pair and each layer, all heads, their mean, and
        the rollout up to the layer.
    """
    sentences = [text for pair in pairs for text in pair.sentences]
    body = {"model": model, "kinds": ["encoder"], "encoding": "base64"}
    found = []
    for number, output in enumerate(served.outputs("/v1/attention", body, sentences)):
        weights = array_of(output["maps"][0])
        columns = (weights, weights.mean(axis=1, keepdims=True), rollout(weights)[:, None])
        every = np.concatenate(columns, axis=1)  # (L, H + 2, S, S)
        words = words_of(sentences[number], output["source_offsets"])
        names = [word.text for word in words]
        row, first, second = (words[names.index(word)].tokens for word in (PRONOUN, *pairs[number // 2].nouns))
        (merged,) = np.moveaxis(merge_weights(every.astype(np.float32), [row], [first, second]), -2, 0)
        difference, both = merged[..., 0] - merged[..., 1], merged.sum(axis=-1)
        found.append(np.divide(difference, both, out=np.zeros_like(both), where=both > 0))
    return np.array(found, np.float64).reshape(len(pairs), 2, *found[0].shape)


def summary(model: str, differences: Weights) -> list[Row]:
    """Return a row for each entry of `CHOICES`, and one with the counts of all heads.

    Args:
        model: The name of the model.
        differences: See `preferences`.
    """
    num_pairs, _, layers, columns = differences.shape
    flat = differences.reshape(num_pairs, 2, -1)
    correct = np.stack((flat[:, 0] > 0, flat[:, 1] < 0), axis=1)  # (P, 2, L (H + 2))
    moved = flat[:, 0] > flat[:, 1] + LEAST_MOVE  # (P, L (H + 2))
    is_head = np.tile(np.arange(columns) < columns - 2, layers)
    pairs, rows = np.arange(num_pairs), list[Row]()
    for name, choice in CHOICES.items():
        chosen = choice(moved, is_head)
        quantities = {
            "correct": (2, correct[pairs, :, chosen].sum(axis=1)),
            "both": (1, correct[pairs, :, chosen].all(axis=1)),
            "moved": (1, moved[pairs, chosen]),
        }
        figures = {
            quantity: mean_with_interval(np.column_stack((np.full(num_pairs, size), values)))
            for quantity, (size, values) in quantities.items()
        }
        rows.append({"model": model, "heads": name, **figures})
    counts = moved.sum(axis=0).reshape(layers, columns).tolist()
    return [*rows, {"model": model, "heads": None, "pairs": num_pairs, "moved": counts}]


def _best_of_same(moved: NDArray[np.bool_], is_head: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.full(len(moved), np.where(is_head, moved.mean(axis=0), -1).argmax())


def _best_of_others(moved: NDArray[np.bool_], is_head: NDArray[np.bool_]) -> NDArray[np.intp]:
    """Choose a head for each half of the pairs on the other half."""
    halves = np.arange(len(moved)) % 2
    best = [_best_of_same(moved[halves != half], is_head)[0] for half in (0, 1)]
    return np.array(best)[halves]


# The column of each pair, chosen from `moved` (P, columns).
CHOICES = {
    "mean of the last layer": lambda moved, is_head: np.full(len(moved), len(is_head) - 2),
    "rollout": lambda moved, is_head: np.full(len(moved), len(is_head) - 1),
    "best head, chosen on the other half": _best_of_others,
    "best head, chosen on the same pairs": _best_of_same,
}
SHOWN = {  # names in the table; the last choice is only a comparison for the one before it
    "mean of the last layer": "last layer",
    "rollout": "rollout",
    "best head, chosen on the other half": "head that moves most",
}


def tables(result: Result) -> Mapping[str, str]:
    head = ["system", "attention of", "noun correct, %", "both correct, %", "weight moves to the noun meant, %"]
    body = [
        [
            f"`{system_of(row['model'])}`",
            SHOWN[row["heads"]],
            *(percent(row[name]["value"], row[name]["interval"], digits=1) for name in ("correct", "both", "moved")),
        ]
        for row in result.rows
        if row["heads"] in SHOWN
    ]
    baseline = [["nearest noun", "", "50", "0", ""], ["chance", "", "50", "25", "50"]]
    return {NAME: table(head, [*body, *baseline])}


def draw(result: Result, folder: Path) -> None:
    """Write `pronouns.svg`: the number of pairs in which the weight moves, by layer and head."""
    rows = [row for row in result.rows if row["heads"] is None]
    heights = [len(row["moved"]) + 1.5 for row in rows]
    with style():
        figure, panels = pyplot.subplots(
            len(rows), 1, figsize=(WIDTH, 0.24 * sum(heights) + 0.8), height_ratios=heights, squeeze=False
        )
        for axes, row in zip(panels[:, 0], rows, strict=True):
            counts = np.array(row["moved"], np.float64)
            columns = [*(f"head {head}" if counts.shape[1] < 10 else str(head) for head in range(counts.shape[1] - 2))]
            axes.set_title(f"{system_of(row['model'])}, {row['pairs']} pairs")
            draw_cells(axes, counts, [*columns, "mean", "rollout"], "{:.0f}".format, row["pairs"])
        note = "The number expected by chance is half of the pairs."
        describe(figure, "Pairs in which the attention of “it” moves to the noun that it refers to", note)
        save(figure, folder / "pronouns.svg")
