"""Measure how many terms of a glossary are in translations, and the chrF that they cost."""

import argparse
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.runs import SOURCE, TARGET
from lab.study.served import serve
from lab.zoo.systems import MULTI30K
from sightline.base.text.words import word_spans
from sightline.model.data.text import read_parallel
from sightline.model.evaluation.bleu import EvaluationSet, read_test_set, score
from sightline.model.evaluation.defaults import TEST_SPLIT
from sightline.translation.glossary import Glossary

NAME = "terms"
TERMS = 100  # of each glossary
LEAST_DICE = 0.3
SEED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help=f"folder with {MULTI30K.name}")
    parser.add_argument("data", type=Path, help=f"folder that contains {MULTI30K.folder}")
    parser.add_argument("--skip", type=int, default=0, help="number of test sentences before those that are used")
    parser.add_argument("--sentences", type=int, help="number of test sentences (default: all)")


def measure(arguments: argparse.Namespace) -> Result:
    """Translate the test set without a glossary, and with each."""
    folder = arguments.data / MULTI30K.folder
    whole = read_test_set(folder, TEST_SPLIT, SOURCE, TARGET)
    used = slice(arguments.skip, arguments.sentences and arguments.skip + arguments.sentences)
    test_set = EvaluationSet(whole.sources[used], whole.references[used])
    rows = list[Row]()
    with serve(arguments.bundles) as served:

        def translate(terms: Mapping[str, str]) -> list[str]:
            body = {"model": MULTI30K.name, "glossary": terms}
            return [output["text"] for output in served.outputs("/v1/translate", body, test_set.sources)]

        plain = translate({})
        for name, terms in glossaries(folder, test_set.sources).items():
            outputs, glossary = translate(terms), Glossary(terms)
            found = [[term.text for term in glossary.find(source)] for source in test_set.sources]
            row = {"glossary": name, "terms": len(terms), "sentences": sum(map(bool, found))}
            for label, texts in (("without", plain), ("with", outputs)):
                pairs = [(term.lower(), text.lower()) for text, own in zip(texts, found, strict=True) for term in own]
                kept = sum(term in text for term, text in pairs)
                row[f"kept_{label}"] = kept / max(1, len(pairs))
                row[f"chrf_{label}"] = score(texts, test_set, TARGET).chrf.value
            rows.append(row)
    return Result(rows=rows)


def glossaries(folder: Path, sources: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return terms of the sources: nouns, as controls words of all kinds and nouns with the
    translations of others.
    """
    translations, rng = dictionary(*read_parallel(folder, "train", SOURCE, TARGET)), random.Random(SEED)
    counts = Counter(word for source in sources for word in _words(source.lower()))
    known = [word for word, _ in counts.most_common(5 * TERMS) if word in translations]
    nouns = [word for word in known if translations[word][0].isupper()][:TERMS]
    drawn = rng.sample(known, min(TERMS, len(known)))
    exchanged = rng.sample(nouns, len(nouns))
    return {
        "nouns": {word: translations[word] for word in nouns},
        "random words": {word: translations[word] for word in drawn},
        "nouns with translations of others": dict(zip(nouns, [translations[word] for word in exchanged], strict=True)),
    }


def dictionary(sources: Sequence[str], targets: Sequence[str]) -> dict[str, str]:
    """Return the translation of each word with the largest Dice coefficient over the sentences."""
    pairs, lefts, rights = Counter[tuple[str, str]](), Counter[str](), Counter[str]()
    for source, target in zip(sources, targets, strict=True):
        left, right = _words(source.lower()), _words(target[:1].lower() + target[1:])
        lefts.update(left)
        rights.update(right)
        pairs.update((word, other) for word in left for other in right)
    best: dict[str, tuple[float, str]] = {}
    for (word, other), count in pairs.items():
        dice = 2 * count / (lefts[word] + rights[other])
        best[word] = max(best.get(word, (LEAST_DICE, "")), (dice, other))
    return {word: other for word, (_, other) in best.items() if other}


def _words(text: str) -> set[str]:
    return {text[slice(*span)] for span in word_spans(text) if text[span[0]].isalpha()}


def tables(result: Result) -> Mapping[str, str]:
    head = ["glossary", "sentences with a term", "kept without it", "kept with it", "chrF without it", "chrF with it"]
    body = []
    for row in result.rows:
        shares, scores = ([row[f"{name}_{label}"] for label in ("without", "with")] for name in ("kept", "chrf"))
        cells = [*(f"{100 * share:.1f} %" for share in shares), *(f"{value:.2f}" for value in scores)]
        body.append([row["glossary"], str(row["sentences"]), *cells])
    return {NAME: table(head, body)}
