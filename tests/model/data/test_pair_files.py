"""Pairs in TMX, XLIFF and tables without names, and the finding of two files."""

import gzip
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sightline.model.data.corpus import Corpus, open_corpus, open_held_out
from sightline.model.data.facts import check_corpus, summary
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading, read_records
from sightline.model.data.records import PairRecord
from tests.support.tables import read_table

PAIRS = [(f"text {number}", f"Satz {number}") for number in range(30)]
SIDES = tuple("".join(f"{pair[side]}\n" for pair in PAIRS) for side in (0, 1))
UNITS = "".join(
    f'<tu><tuv xml:lang="en-US"><seg>{source}</seg></tuv><tuv xml:lang="de-DE"><seg>{target}</seg></tuv></tu>\n'
    for source, target in PAIRS
)
TMX = f'<tmx version="1.4"><header srclang="en-US"/><body>\n{UNITS}</body></tmx>'
XLIFF = '<xliff version="1.2"><file source-language="en" target-language="de"><body>\n{}</body></file></xliff>'
XLIFF_2 = '<xliff version="2.0" srcLang="en" trgLang="de"><file id="f"><unit id="u">\n{}</unit></file></xliff>'


def write(folder: Path, files: Mapping[str, str]) -> Path:
    for name, content in files.items():
        (folder / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    return folder


def opened(data: Path, source: str | None = None, target: str | None = None) -> Corpus:
    return open_corpus(data, Reading("translation", source, target))


@pytest.mark.parametrize(("kind", "units", "expected"), read_table(__file__))
def test_units_become_pairs_or_a_reason(tmp_path: Path, kind: str, units: str, expected: list[Any]) -> None:
    frame = {"tmx": '<tmx version="1.4"><body>\n{}</body></tmx>', "xlf": XLIFF, "xliff": XLIFF_2}[kind]
    path = tmp_path / f"a.{kind}"
    # The last unit is always a pair.
    last = {
        "tmx": UNITS.splitlines()[0],
        "xlf": "<trans-unit><source>text 0</source><target>Satz 0</target></trans-unit>",
        "xliff": "<segment><source>text 0</source><target>Satz 0</target></segment>",
    }[kind]
    path.write_text(frame.format(f"{units}\n{last}"), encoding="utf-8")
    records = list(read_records((path,), Reading("translation", "en", "de")))
    assert records[-1][1] == PairRecord("text 0", "Satz 0")
    found = [record if isinstance(record, str) else [record.source, record.target] for _, record in records[:-1]]  # type: ignore[union-attr]
    assert found == expected
    assert [number for number, _ in records[:-1]] == list(range(2, 2 + len(expected)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "iso-8859-1", "windows-1252"])
def test_xml_has_its_own_encoding(tmp_path: Path, encoding: str) -> None:
    name = encoding.removesuffix("-sig")
    content = f'<?xml version="1.0" encoding="{name}"?>\n<!DOCTYPE tmx SYSTEM "tmx14.dtd">\n' + TMX.replace(
        "Satz", "Sätze"
    )
    (tmp_path / "a.tmx").write_bytes(content.encode(encoding))
    records = dict(read_records((tmp_path / "a.tmx",), Reading("translation", "de", "en")))
    assert records[4] == PairRecord("Sätze 0", "text 0")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('<!DOCTYPE tmx [\n<!ENTITY a "b">]><tmx/>', ", line 2: the file declares an entity; remove it"),
        (
            "<tmx>\n<tu></tmx>",
            ", line 2, column 11: XML error: Opening and ending tag mismatch: tu line 2 and tmx; correct the line, or",
        ),
        ("no XML", ", line 1, column 1: XML error: Start tag expected, '<' not found; correct the line, or export"),
        (TMX.replace("de-DE", "fr"), " has no unit with texts in en and de, but texts in en-US (30), fr (30); name"),
    ],
)
def test_errors_of_xml_name_the_line(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "a.tmx"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(CorpusError) as caught:
        list(read_records((path,), Reading("translation", "en", "de")))
    assert str(caught.value).startswith(f"{path}{problem}")


@pytest.mark.parametrize("name", ["memory.tmx", "memory.TMX", "memory.tmx.gz", ""])
def test_the_direction_of_a_translation_memory_is_asked_for(tmp_path: Path, name: str) -> None:
    data, file = write(tmp_path, {name or "memory.tmx": TMX}) / name, tmp_path / (name or "memory.tmx")
    command = f"sightline train translation {file} --run RUN"
    with pytest.raises(CorpusError) as caught:
        opened(data)
    assert str(caught.value) == (
        f"the languages of {file} are en-US, de-DE; name the direction: {command} --source en-US --target de-DE, or "
        f"{command} --source de-DE --target en-US"
    )
    if name.endswith(".tmx"):
        file.write_text(TMX.replace("en-US", "EN-us", 9), encoding="utf-8")
    corpus = opened(data, "en")  # the other is the only one left
    assert corpus.languages == ("en", "de-DE")
    assert set(corpus.train) | set(corpus.dev) == {PairRecord(*pair) for pair in PAIRS}
    assert next(iter(open_held_out(data, Reading("translation", "de", "en")))) in {
        PairRecord(*pair[::-1]) for pair in PAIRS
    }


def test_xliff_states_its_direction(tmp_path: Path) -> None:
    units = "".join(f"<trans-unit><source>{a}</source><target>{b}</target></trans-unit>" for a, b in PAIRS)
    write(tmp_path, {"a.xlf": XLIFF.format(units), "b.xlf": XLIFF.format(units).replace(' target-language="de"', "")})
    assert opened(tmp_path / "a.xlf").languages == ("en", "de")
    assert next(iter(opened(tmp_path / "a.xlf", "de").train)) in {PairRecord(*pair[::-1]) for pair in PAIRS}
    assert next(iter(opened(tmp_path / "b.xlf", "en", "de").train)).target.startswith("Satz")  # type: ignore[union-attr]
    with pytest.raises(CorpusError, match="states no target language; name it with --source en --target TAG"):
        opened(tmp_path / "b.xlf")


@pytest.mark.parametrize(
    ("first", "second", "languages"),
    [
        ("corpus.en", "corpus.de", ("en", "de")),
        ("Europarl.de-en.en", "Europarl.de-en.de", ("en", "de")),
        ("europarl.en.txt", "europarl.de.txt", ("en", "de")),
        ("train.en_GB", "train.de_DE", ("en", "de-DE")),
        ("train_en.txt", "train_de.txt", ("en", "de")),
        ("corpus.en.gz", "corpus.de.gz", ("en", "de")),
        ("en.txt", "cz.txt", ("en", "cz")),
        ("train.eng", "train.deu", ("en", "deu")),
        ("train.src", "train.tgt", None),
        ("src-train.txt", "tgt-train.txt", None),
    ],
)
def test_two_files_are_found_by_one_of_them_or_by_their_folder(
    tmp_path: Path, first: str, second: str, languages: tuple[str, str] | None
) -> None:
    others = dict.fromkeys(("README", "LICENSE", "Europarl.de-en.xml", "x.ids", "corpus.log"), "x")
    others |= dict.fromkeys(("src-val.txt", "tgt-val.txt"), "x") if first.startswith("src-") else {}
    write(tmp_path, {first: SIDES[0], second: SIDES[1], **others})
    for data in (tmp_path / first, tmp_path / second, tmp_path):
        if languages is not None:
            with pytest.raises(CorpusError, match="name the direction: sightline train translation"):
                opened(data)
        corpus = opened(data, None if languages is None else "en")
        assert [path.name for path in corpus.train.files] == [first, second]
        assert corpus.languages == languages


def test_the_documented_commands_find_their_pairs(tmp_path: Path) -> None:
    page = Path("docs/reference/training-data.md").read_text(encoding="utf-8")
    commands = re.findall(r"`sightline train translation (?!FILE)(\S+)(?: --source (en))? --run RUN`", page)
    tabs = "".join(f"{a}\t{b}\n" for a, b in PAIRS)
    units = "".join(f"<trans-unit><source>{a}</source><target>{b}</target></trans-unit>" for a, b in PAIRS)
    sides = {"corpus.en": SIDES[0], "corpus.de": SIDES[1], "train.src": SIDES[0], "train.tgt": SIDES[1]}
    write(tmp_path, {**sides, "memory.tmx": TMX, "texts.xlf": XLIFF.format(units), "deu.txt": tabs})
    for name, source in commands:
        assert set(opened(tmp_path / name, source or None).train) < {PairRecord(*pair) for pair in PAIRS}
    assert len(commands) == 5


def test_a_side_without_the_other_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError) as caught:
        opened(write(tmp_path, {"corpus.en": SIDES[0]}) / "corpus.en")
    problem = f"one side of pairs, but {tmp_path} has no file for the other, such as corpus.de; add it"
    assert str(caught.value) == f"{tmp_path / 'corpus.en'} is {problem}"


@pytest.mark.parametrize("name", ["deu.txt", "pairs.tsv", "train.txt"])
def test_tables_without_names_have_the_source_first(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: "".join(f"{a}\t{b}\tCC-BY 2.0 (France)\n" for a, b in PAIRS)})
    assert set(opened(tmp_path / name).train) < {PairRecord(*pair) for pair in PAIRS}
    write(tmp_path, {"plain.txt": "a\tb\nno tab\n"})
    with pytest.raises(CorpusError, match=r"plain.txt, line 2: expected source, tab and target, got 1"):
        opened(tmp_path / "plain.txt")


def test_units_that_are_left_out_are_counted(tmp_path: Path) -> None:
    added = '<tu><tuv xml:lang="en"><seg>A b</seg></tuv><tuv xml:lang="{}"><seg>{}</seg></tuv></tu>\n'
    units = added.format("fr", "C") + added.format("de", "A b") + added.format("de", "<ph/>") + added.format("de", "")
    write(tmp_path, {"a.tmx": TMX.replace("<body>", f"<body>{units}")})
    facts = check_corpus(opened(tmp_path / "a.tmx", "en", "de"))
    assert facts.dropped["train"] == {
        "empty": 1, "without one of the languages": 1, "identical": 1, "with only tags": 1
    }  # fmt: skip
    assert "1 identical in train" in "\n".join(summary(facts))
