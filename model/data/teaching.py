"""Targets that a trained model writes for a student (Kim and Rush 2016, section 3.2)."""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from sightline.model.data.corpus import Corpus, Split, digest_of
from sightline.model.data.formats import Reading
from sightline.model.data.records import PairRecord

# Translates texts into a file with one line for each, blank for one that is too long. It continues
# a file that an earlier call has not completed.
Translate = Callable[[Sequence[str], Path], None]

FILE = "teacher.jsonl"  # pairs of train, in the folder of a run


def with_teacher(corpus: Corpus, run: Path, translate: Translate | None) -> tuple[Corpus, str]:
    """Return a corpus whose train has the translations of a teacher as targets, and a note.

    Pairs that the teacher cannot translate, because they are too long for it, keep their targets.
    The pairs are written to the folder of the run; a resumed run has no `translate` and reads them.
    The sources are in memory while they are translated.
    """
    path = run / FILE
    if translate is not None:
        lines = run / "teacher.txt"
        pairs = [record for record in corpus.train if isinstance(record, PairRecord)]
        translate([pair.source for pair in pairs], lines)
        new = path.with_suffix(".new")
        with lines.open(encoding="utf-8", newline="\n") as translations, new.open("w", encoding="utf-8") as file:
            for pair, line in zip(pairs, translations, strict=True):
                target = line.strip() or pair.target
                file.write(json.dumps({"source": pair.source, "target": target}, ensure_ascii=False) + "\n")
        os.replace(new, path)
    train, digests = Split("train", (path,), Reading(corpus.reading.task)), {**corpus.digests, FILE: digest_of(path)}
    return replace(corpus, train=train, digests=digests), f"targets of train: translations of the teacher, in {path}"
