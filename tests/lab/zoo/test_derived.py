from pathlib import Path
from random import Random

import pytest

from lab.zoo import derived
from lab.zoo.derived import LONGEST, SHORTEST, derive, joined, small


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("corpus"), Random(3)
    for split in ("train", "val"):
        sources = [" ".join([f"s{number}"] * rng.randint(3, 15)) for number in range(300)]
        (folder / f"{split}.en").write_text("\n".join(sources) + "\n", encoding="utf-8")
        for ending in ("de", "lc.norm.tok.en", "lc.norm.tok.de"):
            lines = [f"{ending}{number}\n" for number in range(300)]
            (folder / f"{split}.{ending}").write_text("".join(lines), encoding="utf-8")
    return folder


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def test_a_joined_corpus_has_sources_of_20_to_60_words_whose_lines_correspond(corpus: Path, tmp_path: Path) -> None:
    derive("joined", corpus, tmp_path / "runs" / "joined")
    for split in ("train", "val"):
        sources, targets, tokens = (
            lines(tmp_path / "runs" / "joined" / f"{split}.{ending}") for ending in ("en", "de", "lc.norm.tok.de")
        )
        assert len(sources) > 30
        used = []
        for source, target, tokenised in zip(sources, targets, tokens, strict=True):
            assert SHORTEST <= len(source.split()) <= LONGEST
            numbers = list(dict.fromkeys(word.removeprefix("s") for word in source.split()))
            assert target.split() == [f"de{number}" for number in numbers]
            assert tokenised.split() == [f"lc.norm.tok.de{number}" for number in numbers]
            used += numbers
        assert len(set(used)) == len(used)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["joined"]


def test_a_small_corpus_has_a_part_of_train_in_its_order(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived, "SMALL_PAIRS", 40)
    derive("small", corpus, tmp_path / "small")
    targets = [int(line.removeprefix("de")) for line in lines(tmp_path / "small" / "train.de")]
    assert len(targets) == 40 and targets == sorted(targets)
    assert lines(tmp_path / "small" / "val.de") == lines(corpus / "val.de")


def test_a_rule_depends_only_on_the_sources() -> None:
    sources = ["a b c d e f g"] * 100
    assert joined("train", sources) == joined("train", list(sources)) != joined("val", sources)
    assert small("train", sources) == [[number] for number in range(100)]


def test_an_existing_corpus_stays(corpus: Path, tmp_path: Path) -> None:
    derive("small", corpus, tmp_path)
    assert not list(tmp_path.iterdir())


def test_files_of_different_lengths_are_an_error(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "train.en").write_text("a b\n" * 300, encoding="utf-8")
    (tmp_path / "train.de").write_text("a\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.de has 1 lines, fewer than train\.en"):
        derive("small", tmp_path, tmp_path / "small")
    with pytest.raises(FileNotFoundError, match=r"missing file train\.en"):
        derive("small", tmp_path / "none", tmp_path / "small")


def test_a_labelled_corpus_has_records(tmp_path: Path) -> None:
    (tmp_path / "train.tsv").write_text("1\ta\tfilm\n0\tdull\n", encoding="utf-8")
    derive("labelled", tmp_path, tmp_path / "labelled")
    assert lines(tmp_path / "labelled" / "train.jsonl") == [
        r'{"text": "a\tfilm", "label": "positive"}',
        '{"text": "dull", "label": "negative"}',
    ]
    with pytest.raises(FileNotFoundError, match=r"missing file train\.tsv"):
        derive("labelled", tmp_path / "none", tmp_path / "other")


@pytest.mark.parametrize("line", ["good film", "1\t", "\tfilm", "one\tfilm", "2\tfilm", ""])
def test_a_line_without_a_label_and_a_text_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "train.tsv").write_text(f"1\tfine\n{line}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"train\.tsv, line 2: expected `label index, tab, text`"):
        derive("labelled", tmp_path, tmp_path / "labelled")
    assert [path.name for path in tmp_path.iterdir()] == ["train.tsv"]
