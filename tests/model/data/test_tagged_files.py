"""Texts with entities, in the forms that tools and data sets have."""

import json
from pathlib import Path
from typing import Any

import pytest

from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading, read_records
from sightline.model.data.records import Entity, TaggedRecord
from sightline.model.data.tagged_files import OVERLAPPING, entities_of_tags, join_words

# Each file has these two sentences. "Anna Li" and "Bo" are persons next to each other.
TEXT = "Anna Li Bo saw New York."
ENTITIES = [("Anna Li", "PER"), ("Bo", "PER"), ("New York", "LOC")]
WORDS = ["Anna", "Li", "Bo", "saw", "New", "York", "."]
SCHEMES = {
    "BIO": "B-PER I-PER B-PER O B-LOC I-LOC O",
    "IOB1": "I-PER I-PER B-PER O I-LOC I-LOC O",
    "IOE1": "I-PER E-PER I-PER O I-LOC I-LOC O",
    "BILOU": "B-PER L-PER U-PER O B-LOC L-LOC O",
    "BIOES": "B-PER E-PER S-PER O B-LOC E-LOC O",
    "underscores": "B_PER I_PER B_PER O B_LOC I_LOC O",
}
SPANS: list[Any] = [[0, 7, "PER"], [8, 10, "PER"], [15, 23, "LOC"]]


def lines(tags: str, form: str = "{word} {tag}") -> str:
    rows = zip(WORDS, tags.split(), strict=True)
    return "\n".join(form.format(word=word, tag=tag, number=number) for number, (word, tag) in enumerate(rows, 1))


def twice(sentence: str) -> str:
    return f"{sentence}\n\n{sentence}\n"


def objects(**fields: Any) -> str:
    return twice(json.dumps(fields))


DICTS = [{"start": start, "end": end, "label": label, "text": TEXT[start:end]} for start, end, label in SPANS]
COMMAS = lines(SCHEMES["BIO"], ",{word},NN,{tag}").removeprefix(",")
NUMBERED = "\n".join(lines(SCHEMES["BIO"], f"{n},{{word}},{{tag}}") for n in (7, 8))
FILES = {
    **{f"{name}.conll": twice(lines(tags)) for name, tags in SCHEMES.items()},
    "four columns.txt": f"-DOCSTART- -X- O O\n\n{twice(lines(SCHEMES['IOB1'], '{word} NN B-NP {tag}'))}",
    "tabs.tsv": "word\ttag\n" + twice(lines(SCHEMES["BIO"], "{word}\t{tag}")).replace("\n", "\r\n"),
    "trailing tabs.bio": twice(lines(SCHEMES["BIO"], "{word}\t{tag}\t")),
    "GermEval.tsv": twice("#\thttps://example.org [2009]\n" + lines(SCHEMES["BIO"], "{number}\t{word}\t{tag}\tO")),
    "MultiCoNER.conll": twice("# id 1  domain=en\n" + lines(SCHEMES["BIO"], "{word} _ _ {tag}")),
    "no blank line at the end.iob": twice(lines(SCHEMES["BIO"])).rstrip(),
    "spans.jsonl": objects(text=TEXT, entities=SPANS),
    "doccano.jsonl": objects(id=1, text=TEXT, label=SPANS, Comments=[]),
    "old doccano.json": objects(id=1, text=TEXT, labels=SPANS, meta={}),
    "relations.jsonl": objects(
        text=TEXT, entities=[{"id": 1, "label": x, "start_offset": s, "end_offset": e} for s, e, x in SPANS]
    ),
    "Prodigy.jsonl": objects(text=TEXT, tokens=[{"text": "Anna", "start": 0, "end": 4, "id": 0}], spans=DICTS),
    "JSON_MIN.json": json.dumps(
        [{"text": TEXT, "label": [{**one, "labels": [one.pop("label")]} for one in DICTS]}] * 2
    ),
    "spaCy.jsonl": twice(json.dumps([TEXT, {"entities": SPANS}])),
    "spaCy.json": json.dumps([[TEXT, {"entities": SPANS}]] * 2, indent=1),
    "annotator.json": json.dumps({"classes": ["PER", "LOC"], "annotations": [[TEXT, {"entities": SPANS}]] * 2}),
    # The first word of a sentence has its number; in other files, all words have it.
    "Kaggle.csv": "Sentence #,Word,POS,Tag\nSentence: 1," + "\nSentence: 2,".join([COMMAS] * 2),
    "numbers.csv": f"sentence_id,words,labels\n{NUMBERED}",
    "words.csv": "word,tag\n" + twice(lines(SCHEMES["BIO"], "{word},{tag}")),
    "datasets.jsonl": objects(id="0", tokens=WORDS, pos_tags=[1] * 7, ner_tags=SCHEMES["BIO"].split()),
    "words.jsonl": objects(words=WORDS, labels=SCHEMES["BIOES"].split()),
}


def read(path: Path, content: str) -> list[Any]:
    path.write_text(content, encoding="utf-8")
    return [record for _, record in read_records((path,), Reading("tagging"))]


@pytest.mark.parametrize("name", FILES)
def test_each_form_has_the_same_entities(name: str, tmp_path: Path) -> None:
    for record in read(tmp_path / name, FILES[name]):
        assert record.text == TEXT
        assert [(TEXT[one.start : one.end], one.label) for one in record.entities] == ENTITIES
    assert len(read(tmp_path / name, FILES[name])) == 2


@pytest.mark.parametrize(
    ("tags", "entities"),
    [
        ("O I-A I-B B-B O", [(1, 2, "A"), (2, 3, "B"), (3, 4, "B")]),
        ("B-A O I-A", [(0, 1, "A"), (2, 3, "A")]),
        ("B I O B", [(0, 2, "entity"), (3, 4, "entity")]),  # as in corpora of diseases
        ("art art person-actor O", [(0, 2, "art"), (2, 3, "person-actor")]),  # as in Few-NERD
        ("B-A M-A E-A S-A", [(0, 3, "A"), (3, 4, "A")]),
    ],
)
def test_tags_become_entities(tags: str, entities: list[tuple[int, int, str]]) -> None:
    assert entities_of_tags(tags.split()) == entities


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("He did n't ( ever ) say : Go , Anna 's !", "He didn't (ever) say: Go, Anna's!"),
        ("我 在 北 京 2 0 0 8", "我在北京2008"),
        ("我们 在 Berlin 。", "我们在Berlin。"),
        ("서울 은 크다", "서울 은 크다"),
    ],
)
def test_words_become_a_text_as_people_write_it(words: str, text: str) -> None:
    joined, ranges = join_words(words.split())
    assert joined == text
    assert [joined[start:end] for start, end in ranges] == words.split()


def test_overlapping_entities_are_counted_and_the_longest_kept(tmp_path: Path) -> None:
    spans = [[0, 4, "PER"], [0, 7, "PER"], [0, 7, "PER"], [14, 24, "LOC"], [20, 23, "LOC"], [7, 8, "PER"]]
    (record,) = read(tmp_path / "a.jsonl", json.dumps({"text": TEXT, "entities": spans}))
    assert record == TaggedRecord(
        TEXT, (Entity(0, 7, "PER"), Entity(15, 24, "LOC")), (OVERLAPPING,) * 2
    )  # without the space at 14


def test_annotations_that_were_not_accepted_are_left_out(tmp_path: Path) -> None:
    file, answers = tmp_path / "prodigy.jsonl", ("accept", "reject", "ignore")
    rows = ({"text": TEXT, "spans": SPANS, "_input_hash": 1, "answer": answer} for answer in answers)
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    accepted, *others = [record for _, record in read_records((file,), Reading("tagging"))]
    assert isinstance(accepted, TaggedRecord) and others == ["rejected", "rejected"]


WRONG = {
    "a.conll": [
        ("Anna B-PER\nsaw\n", r"line 2: expected 2 columns as in most lines, got 1; each line needs a word and its"),
        ("Anna B-PER\n\nLi PER\n", r"line 3: 'PER' is no tag: it is not O and has no prefix such as B- or I-; each"),
        ("One text\nand another text\n", "expected 2 columns as in most lines, got 3"),
        ("Anna (PERSON*\n", "line 1: '\\(PERSON\\*' is no tag"),
        ("1 Anna _\n2 saw SpaceAfter=No\n", "line 2: 'SpaceAfter=No' is no tag"),
    ],
    "a.csv": [
        ("text,label\nOne text,A\n", "line 2: 'A' is no tag"),
        ("Sentence #,Sentence,POS,Tag\nSentence: 1,a b,x,\"['O', 'O']\"\n", r"line 2: \"\['O', 'O'\]\" is no tag"),
    ],
    "a.jsonl": [
        ('{"text": "a", "entities": [[0, 2, "X"]]}', r"line 1: entities\[0\] goes from 0 to 2, but the text has 1 c"),
        ('{"text": "a", "entities": [["X", 0, 1]]}', r"start and end of entities\[0\] must be integers, got a string"),
        ('{"text": "a", "entities": [[0, 1]]}', r"entities\[0\] must be \[start, end, label\] or"),
        ('{"text": "a", "label": "X"}', "label must be a list of .start, end, label., got a string"),
        ('{"text": "a"}', 'expected a text and its entities, got text; a text needs "text" and "entities"'),
        ('{"tokens": ["a"], "ner_tags": [1]}', "ner_tags has numbers instead of tags such as B-PER"),
        ('{"tokens": ["a"], "ner_tags": []}', "ner_tags must be a list with a tag for each word, got 0 of 1"),
        ('{"text": "ab", "spans": [{"start": 0, "end": 1, "label": "X", "text": "b"}]}', "is 'b', but the text has"),
        ('{"id": 1, "data": {"text": "a"}, "annotations": []}', "export of Label Studio in JSON; export it"),
    ],
    "a.json": [
        ('[{"text": "a",\n "entities": []},\n {"text": }]', "line 3, column 11: JSON error: Expecting value"),
        ('[\n1]', "record 1: expected a JSON object, got an integer"),
        ('[{"text": "a", "entities": []}', "JSON error: Expecting ',' delimiter; the file must be a list"),
        ('{"a": 1}\n{"text": "a"}', "record 1: expected a text and its entities, got a"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "message"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_an_error_names_the_line_and_the_way_out(name: str, content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=message):
        read(tmp_path / name, content)
