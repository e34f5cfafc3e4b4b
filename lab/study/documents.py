"""Measure what comes back unchanged from the translations of documents that are made by rules."""

import argparse
import html
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.served import served_translators
from lab.study.step import add_keep, keep_last_rows

NAME = "documents"
# Words, parts that must not change (each place in one gets a word or a number), and forms of text.
PARTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
TAG = re.compile(r"<(/?)(\w+)[^>]*>")
INDENT = re.compile("^ +", re.MULTILINE)
MARK = re.compile(r"\s*(?:(?:[->]|\d\.|#+) (?:\[x\] )?)?")  # at the start of a line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, nargs="+", help="folders of bundles; each has a translator")
    add_keep(parser, "models")
    parser.add_argument("--documents", type=int, default=1000, help="number of documents")


def measure(arguments: argparse.Namespace) -> Result:
    """Translate the same documents with each model; every second one is HTML."""
    rows = list[Row]()
    for served, manifest in served_translators(*arguments.bundles):
        counts = Counter[str]()
        for is_html in (False, True):
            documents = [document(seed, is_html) for seed in range(is_html, arguments.documents, 2)]
            body = {"model": manifest.name, "markup": "html" if is_html else None}
            outputs = served.outputs("/v1/translate", body, [source for source, _ in documents])
            for (source, spans), output in zip(documents, outputs, strict=True):
                counts.update(compare(source, output["text"], spans))
                counts["empty"] += sum(start == end for *_, start, end in output["sentences"])
        rows.append({"model": manifest.name, **counts})
    return Result(rows=keep_last_rows(arguments.results, NAME, rows, itemgetter("model")) if arguments.keep else rows)


def document(seed: int, is_html: bool) -> tuple[str, list[str]]:
    """Return a document, and the parts of it that must not change."""
    rng, spans = random.Random(seed), list[str]()

    def filled(form: str) -> str:
        return form.format(*rng.sample(PARTS["words"], 2), rng.randint(10, 99))

    def sentence() -> str:
        form: str = rng.choice(PARTS["sentences"])
        own = [filled(rng.choice(PARTS["spans"])) for _ in range(form.count("{}"))]
        spans.extend(own)
        if not is_html:
            return form.format(*own)
        words = form.split()
        first = rng.randrange(len(words))
        last = rng.randint(first + 1, min(first + 3, len(words)))
        words[first:last] = [rng.choice(PARTS["inline"]).replace("{}", " ".join(words[first:last]))]
        return " ".join(words).format(*map(html.escape, own))

    blocks = []
    for _ in range(rng.randint(3, 5)):
        if rng.random() < 0.15:
            code = filled(PARTS["code"])
            blocks.append(f"<pre>{code}</pre>" if is_html else f"```python\n{code}\n```")
            spans.append(code)
            continue
        form, count = rng.choice(PARTS["elements" if is_html else "lines"]), rng.randint(1, 2)
        blocks.append(form.replace("{}", " ".join(sentence() for _ in range(count))))
    return "".join(block + "\n" * rng.randint(1, 3) for block in blocks), spans


def compare(source: str, output: str, spans: Sequence[str]) -> Counter[str]:
    """Count the parts, lines and tags of a document, and those that its translation has."""
    tags = [Counter(match[0] for match in TAG.finditer(text)) for text in (source, output)]
    # Indentation means nothing in HTML.
    before, after = (INDENT.sub("", html.unescape(TAG.sub("", text))) if tags[0] else text for text in (source, output))
    numbers = [(before.count(span), after.count(span)) for span in set(spans)]
    lines = list(zip(before.split("\n"), after.split("\n"), strict=False))
    return Counter(
        documents=1,
        spans=sum(number for number, _ in numbers),
        spans_kept=sum(map(min, numbers)),
        spans_added=sum(max(found - number, 0) for number, found in numbers),
        lines=before.count("\n"),
        lines_kept=(len(lines) == before.count("\n") + 1 == after.count("\n") + 1)
        * (sum(_mark(line) == _mark(other) for line, other in lines) - 1),
        tags=tags[0].total(),
        tags_kept=(tags[0] & tags[1]).total(),
        tags_added=(tags[1] - tags[0]).total(),
        well_formed=_is_nested(output),
    )


def _mark(line: str) -> tuple[str, bool]:
    mark = MARK.match(line)
    assert mark is not None, "it may be empty"
    return mark[0], bool(line[mark.end() :].strip())


def _is_nested(text: str) -> bool:
    """Return True if every end tag ends the element that began last."""
    open_elements: list[str] = []
    for is_end, name in TAG.findall(text):
        if not is_end:
            open_elements += [name] * (name not in ("br", "img"))
        elif not open_elements or open_elements.pop() != name:
            return False
    return not open_elements


def tables(result: Result) -> Mapping[str, str]:
    head = ["model", "documents", "well-formed", "spans kept", "lines kept", "tags kept", "added spans, tags"]
    body = [
        [
            f"`{row['model']}`",
            f"{row['documents']:,}",
            f"{row['well_formed']:,}",
            *(f"{row[f'{name}_kept']:,} of {row[name]:,}" for name in ("spans", "lines", "tags")),
            f"{row['spans_added']}, {row['tags_added']}",
        ]
        for row in result.rows
    ]
    return {NAME: table(head, body)}
