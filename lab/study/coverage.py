"""Measure how well omitted and doubtful words are found, and what the repair of omissions gains."""

import argparse
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.chrf import CHRF

from lab.bench.load import GENERATE
from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import interval, resamples
from lab.study.planting import Case, Pair, deleted, inserted, joined, judged, left_out, made_up, negated
from lab.study.runs import SOURCE, TARGET
from lab.study.served import Served, served_translators
from lab.study.step import add_keep, keep_last_rows
from lab.study.tags import FUNCTION_WORDS
from lab.study.terms import dictionary
from lab.study.word_aligner import align
from lab.study.word_links import Links, words_in
from lab.zoo.systems import MULTI30K
from sightline.base.bundle import Manifest
from sightline.base.text.words import Span, is_name, word_spans
from sightline.export.check.coverage import Material
from sightline.model.data.text import read_lines
from sightline.model.evaluation.defaults import TEST_SPLIT

NAME = "coverage"
OTHER_SPLIT = "test_2017_mscoco"  # captions of other pictures; left out if the folder lacks them
PLANTED = 200  # sentences of each set with planted errors
TRAINING = 10_000  # pairs from which the judge learns
TRANSLATED = 3000  # of these, if the model itself must translate them
SEED = 1
REFERENCES, OWN, OTHERS, SEVERAL = "references", "own translations", "own translations of mscoco", "several captions"
KINDS = {  # of English words; others are nouns if their usual translation has a capital
    "number": re.compile(r"\d+|one|two|three|four|five|six|seven|eight|nine|ten"),
    "not": re.compile("not"),
    "function word": FUNCTION_WORDS,
    "verb": re.compile(r"\w+(ing|s)"),
    "adjective or adverb": re.compile(".*"),
}
MIN_TAIL = 2  # tokens that the continuation of an early end adds at least
Pairs = Sequence[Pair]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, nargs="+", help="folders of bundles; each has a translator")
    add_keep(parser, "models")
    parser.add_argument("--data", type=Path, required=True, help=f"the folder {MULTI30K.folder}")
    parser.add_argument("--sentences", type=int, help="number of test sentences, from the first one (default: all)")


def measure(arguments: argparse.Namespace) -> Result:
    """Plant errors, judge outputs, and repair them."""
    words = dictionary(*(read_lines(arguments.data / f"train.{name}")[:TRAINING] for name in (SOURCE, TARGET)))
    nouns, rows = {word for word, translation in words.items() if translation[0].isupper()}, list[Row]()
    for served, manifest in served_translators(*arguments.bundles):
        study = Study(served, manifest, arguments.data, arguments.sentences)
        rows += [{"model": manifest.name, **row} for row in study.rows(nouns)]
    return Result(rows=keep_last_rows(arguments.results, NAME, rows, itemgetter("model")) if arguments.keep else rows)


class Study:
    """The measurements of one model."""

    def __init__(self, served: Served, manifest: Manifest, data: Path, limit: int | None) -> None:
        """Translate the sets, and learn which words stand for each other."""
        assert manifest.languages is not None, "it translates"
        self._served, self._model = served, manifest.name
        references, train = (_lines(data / f"{split}.{manifest.languages.target}") for split in (TEST_SPLIT, "train"))
        self._sources, others = (_lines(data / f"{split}.{SOURCE}")[:limit] for split in (TEST_SPLIT, OTHER_SPLIT))
        learned = _lines(data / f"train.{SOURCE}")[: TRAINING if train else TRANSLATED]
        starts = np.cumsum([0, *(2 + number % 3 for number in range(min(PLANTED, len(self._sources)) // 3))]).tolist()
        self._groups = [slice(first, last) for first, last in pairwise(starts)]
        several = [" ".join(self._sources[group]) for group in self._groups]
        self._outputs, self._several = self._generate(self._sources), self._generate(several)
        self._pairs: dict[str, Pairs] = {
            REFERENCES: list(zip(self._sources, references, strict=False)),
            OWN: _pairs(self._sources, self._outputs),
            OTHERS: _pairs(others[:PLANTED], self._generate(others[:PLANTED])),
            SEVERAL: _pairs(several, self._several),
            "training": list(zip(learned, train, strict=False)) or _pairs(learned, self._generate(learned)),
        }
        pairs = [pair for each in self._pairs.values() for pair in each]
        found = iter(align([(words_in(source), words_in(target)) for source, target in pairs]))
        self._links: dict[str, list[Links]] = {name: [next(found) for _ in each] for name, each in self._pairs.items()}

    def _generate(self, inputs: Sequence[str], **changes: Any) -> list[Any]:
        parameters = {"split_sentences": False, "return_coverage": True, **changes}
        return self._served.outputs(GENERATE, {"model": self._model, "parameters": parameters}, inputs)

    def _score(self, cases: Sequence[Case], **changes: bool) -> list[Any]:
        body = {"model": self._model, "return_coverage": True, **changes}
        targets = [case.target for case in cases]
        return self._served.outputs("/v1/score", body, [case.source for case in cases], targets=targets)

    def rows(self, nouns: set[str]) -> Iterator[Row]:
        """Yield a row for each set of errors and each kind of words, and the gain of repairs."""
        base = REFERENCES if self._pairs[REFERENCES] else OWN
        for name in (REFERENCES, OWN, OTHERS):
            if cases := self._planted(name):
                outputs = self._score(cases)
                yield row_of(f"planted on {name}", cases, outputs)
            if name == base:
                yield row_of(f"planted on {name}, confirmed", cases, self._score(cases, confirm_omissions=True))
                more = [
                    case
                    for number, pair in enumerate(self._pairs[name])
                    for case in negated(number, pair, self._links[name][number])
                ][:PLANTED]
                yield from _rows_of_kinds([*cases, *more], [*outputs, *self._score(more)], nouns)
        groups = [(self._pairs[OWN][group], self._links[OWN][group]) for group in self._groups]
        cases = [left_out(number, *group) for number, group in enumerate(groups)]
        yield row_of(f"{SEVERAL}, one left out", cases, self._score(cases))
        together = zip(groups, self._pairs[SEVERAL], self._links[SEVERAL], strict=True)
        cases = [joined(number, *group, text, found) for number, (group, (_, text), found) in enumerate(together)]
        yield row_of(f"{SEVERAL}, outputs", cases, self._several)
        confirmed = self._generate(self._sources, confirm_omissions=True)
        if self._pairs[REFERENCES]:
            both = zip(self._pairs[OWN], self._links[OWN], self._links[REFERENCES], strict=True)
            cases = [judged(number, *each) for number, each in enumerate(both)]
            yield row_of("ordinary outputs", cases, self._outputs)
            yield row_of("ordinary outputs, confirmed", cases, confirmed)
            yield self._repair([target for _, target in self._pairs[REFERENCES]])
        pairs, rng = self._pairs[base][:PLANTED], np.random.default_rng(SEED)
        material = Material([target for _, target in pairs])
        cases = [case for number, pair in enumerate(pairs) for case in made_up(number, pair, material, rng)]
        yield row_of(f"words added to {base}", cases, self._score(cases), ("target_words", "logprob", "doubtful"))
        yield self._marks(confirmed)

    def _planted(self, name: str) -> list[Case]:
        """Return sources with insertions, and targets with deletions."""
        pairs, rng, cases = self._pairs[name][:PLANTED], np.random.default_rng(SEED), list[Case]()
        material = Material([source for source, _ in pairs])
        for number, (pair, links) in enumerate(zip(pairs, self._links[name], strict=False)):
            cases += [*inserted(number, pair, links, material, rng), *deleted(number, pair, links, rng)]
        return cases

    def _repair(self, references: Sequence[str]) -> Row:
        """Repair ordinary outputs, and compare them with the references."""
        repaired = self._generate(self._sources, repair=True)
        flagged = [number for number, output in enumerate(repaired) if output["repair"]]
        scores = [
            [
                CHRF().sentence_score(outputs[each]["text"], [references[each]]).score
                for outputs in (self._outputs, repaired)
            ]
            for each in flagged
        ]
        before, after = np.array(scores or [[0.0, 0.0]]).T
        gains = resamples(len(before)) @ (after - before) / len(before)
        return {
            "set": "repair",
            "texts": len(repaired),
            "repaired": len(flagged),
            "changed_others": sum(
                not two["repair"] and one != two for one, two in zip(self._outputs, repaired, strict=True)
            ),
            "methods": dict(Counter(repaired[number]["repair"]["method"] for number in flagged)),
            "chrf": [round(float(each.mean()), 2) for each in (before, after)],
            "gain": [round(float(value), 2) for value in ((after - before).mean(), *interval(gains))],
        }

    def _marks(self, confirmed: Sequence[Any]) -> Row:
        """Count marked outputs; cut translations to a half, and continue them as a repair does."""
        halves = list[tuple[str, str, str]]()  # source, first half, second half
        for source, target in self._pairs[OWN][:PLANTED]:
            if spans := word_spans(target):
                end = spans[len(spans) // 2][1]
                halves.append((source, target[:end], target[end:]))
        cut = self._score([Case(0, source, first, ()) for source, first, _ in halves])
        lost, restored = Counter[str](), Counter[str]()
        for source, first, second in halves:
            (output,) = self._generate([source], min_new_tokens=MIN_TAIL, target_prefix=first)
            lost.update(words_in(second))
            restored.update(Counter(words_in(second)) & Counter(words_in(output["text"][len(first) :])))
        shares = {
            name: _share([any(word["omitted"] for word in output["coverage"]["source_words"]) for output in outputs])
            for name, outputs in (("marked", self._outputs), ("confirmed", confirmed), ("marked_cut", cut))
        }
        return {"set": "marks", **shares, "restored": round(restored.total() / max(1, lost.total()), 4)}


def row_of(
    name: str,
    cases: Sequence[Case],
    outputs: Sequence[Any],
    fields: tuple[str, str, str] = ("source_words", "coverage", "omitted"),
) -> Row:
    """Return the AUROC of the words of some cases, and recall and precision of their marks."""
    side, score, mark = fields
    words = [
        (case.group, word[score], _is_in(word["start"], case.errors), word[mark])
        for case, output in zip(cases, outputs, strict=True)
        for word in output["coverage"][side]
        if is_name(word["text"]) and not _is_in(word["start"], case.unknown)
    ]
    groups, scores, errors, marked = map(np.array, zip(*words, strict=True))
    row = {"set": name, "texts": len(cases), "words": len(words), "errors": int(errors.sum())}
    shares = {"recall": _share(marked[errors]), "precision": _share(errors[marked])}
    return {**row, "auroc": auroc(scores, errors, groups), **shares}


def _is_in(start: int, ranges: Sequence[Span]) -> bool:
    return any(first <= start < last for first, last in ranges)


def _share(flags: Any) -> float:
    return round(float(sum(flags)) / max(1, len(flags)), 4)


def auroc(scores: Any, errors: Any, groups: Any) -> list[float]:
    """Return the probability that an error has a lower score than another word, with the ends of
    its interval over resampled groups; ties count half. It is empty without a pair of such words.
    """
    if not 0 < errors.sum() < len(errors):
        return []
    _, index = np.unique(groups, return_inverse=True)
    member = np.eye(index.max() + 1, dtype=np.float32)[index]  # (words, groups)
    wins = (np.sign(scores[~errors] - scores[errors, None]) + 1) / 2  # (errors, others)
    by_group = member[errors].T @ wins @ member[~errors]
    counts = np.vstack([np.ones(index.max() + 1), resamples(index.max() + 1)])  # (1 + R, groups)
    pairs = (counts @ member[errors].sum(axis=0)) * (counts @ member[~errors].sum(axis=0))
    values = ((counts @ by_group) * counts).sum(axis=1) / np.maximum(1, pairs)
    return [round(float(value), 4) for value in (values[0], *interval(values[1:]))]


def _rows_of_kinds(cases: Sequence[Case], outputs: Sequence[Any], nouns: set[str]) -> Iterator[Row]:
    """Yield a row for each kind, with its omitted words and all translated ones."""
    for kind in ("noun", *KINDS):
        of_kind = list[Case]()
        for case in cases:
            words = [
                (case.source[slice(*span)], span) for span in word_spans(case.source) if _is_in(span[0], case.errors)
            ]
            others = [span for word, span in words if _kind(word, nouns) != kind]
            of_kind.append(replace(case, unknown=[*case.unknown, *others]))
        yield {**row_of("kinds", of_kind, outputs), "kind": kind}


def _kind(word: str, nouns: set[str]) -> str:
    kind = next(kind for kind, pattern in KINDS.items() if pattern.fullmatch(word.lower()))
    return "noun" if kind in ("verb", "adjective or adverb") and word.lower() in nouns else kind


def _lines(path: Path) -> list[str]:
    return read_lines(path) if path.exists() else []


def _pairs(sources: Sequence[str], outputs: Sequence[Any]) -> Pairs:
    return [(source, output["text"]) for source, output in zip(sources, outputs, strict=True)]


def tables(result: Result) -> Mapping[str, str]:
    head = ["errors", "texts", "wrong words of all", "AUROC", "wrong words with a mark", "marks that are right"]
    sets, kinds, sentences = list[list[str]](), list[list[str]](), list[str]()
    for row in result.rows:
        model = f"`{row['model']}`"
        if row["set"] == "repair":
            gain = "{:+.1f} [{:+.1f}, {:+.1f}]".format(*row["gain"])
            methods = ", ".join(f"{method} {count}" for method, count in row["methods"].items())
            before, after = row["chrf"]
            sentences.append(
                f"{row['repaired']} of {row['texts']} outputs of {model} were repaired ({methods}). Their chrF "
                f"rose from {before:.1f} to {after:.1f}: {gain}. {row['changed_others']} other outputs changed."
            )
        elif row["set"] == "marks":
            marked, cut, restored = (f"{100 * row[name]:.1f} %" for name in ("marked", "marked_cut", "restored"))
            confirmed = f" ({100 * row['confirmed']:.1f} % a confirmed one)" if "confirmed" in row else ""
            text = f"{marked} of all outputs of {model} have a mark{confirmed}, and {cut} of those cut to a half."
            sentences.append(f"{text} A continuation restores {restored} of the words that were cut.")
        else:
            ends = "{:.3f} [{:.3f}, {:.3f}]".format(*row["auroc"]) if row["auroc"] else ""
            shares = [f"{100 * row[name]:.0f} %" for name in ("recall", "precision")]
            counts = [f"{row['texts']:,}", f"{row['errors']:,} of {row['words']:,}"]
            cells = [model, row.get("kind", row["set"]), *counts, ends, *shares]
            (kinds if "kind" in row else sets).append(cells)
    return {
        NAME: table(["model", *head], sets),
        f"{NAME}-kinds": table(["model", "kind", *head[1:5]], [cells[:6] for cells in kinds]),
        f"{NAME}-repair": " ".join(sentences),
    }
