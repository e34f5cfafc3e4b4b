"""Files of word links: the words that they count, the tokens of each word, and their errors."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sightline.model.data.alignments import read_links
from sightline.model.data.corpus import Corpus, open_corpus
from sightline.model.data.encoding import encode
from sightline.model.data.examples import MemoryExamples
from sightline.model.data.files import CorpusError
from sightline.model.data.formats import Reading
from sightline.model.data.tokenizer_training import train_tokenizer

ENGLISH = ["A dog runs.", "Two  men, outside", "", "A cat sleeps.", "Hello"]
GERMAN = ["Ein Hund rennt.", "Draußen zwei Männer", "", "Eine Katze schläft.", "Hallo"]
WORDS = "0-0 1-1 2-2\n0-1 1-2 2-0\n\n\n0-0\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([*ENGLISH, *GERMAN], 300)


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    for name, lines in (("train.en", ENGLISH), ("train.de", GERMAN), ("dev.en", ["A"]), ("dev.de", ["Ein"])):
        (tmp_path / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return open_corpus(tmp_path, Reading("translation", "en", "de"))


def linked_texts(text: str, corpus: Corpus, tokenizer: Tokenizer, longest: int = 99) -> list[list[tuple[str, str]]]:
    """Return the linked texts of each example; neighbours with the same source are joined."""
    path = corpus.train.files[0].with_suffix(".align")
    path.write_text(text, encoding="utf-8")
    examples = [example for example in encode(tokenizer, list(corpus.train)) if max(map(len, example)) <= longest]
    links, found = read_links(path, corpus.train, tokenizer, MemoryExamples(examples))[0], list[list[tuple[str, str]]]()
    for index, (source, target) in enumerate(examples):
        sources, pairs = dict[int, str](), list[tuple[str, str]]()
        for one, other in sorted(zip(*links[index], strict=True)):
            sources[other] = sources.get(other, "") + tokenizer.decode([source[one]]).strip()
        for other in sorted(sources):
            before = pairs.pop()[0] if pairs and pairs[-1][1] == sources[other] else ""
            pairs.append((before + tokenizer.decode([target[other]]).strip(), sources[other]))
        found.append(pairs)
    return found


@pytest.mark.parametrize("text", [WORDS, WORDS.replace("\n", "\r\n")])
def test_links_of_words_become_links_of_their_tokens(text: str, corpus: Corpus, tokenizer: Tokenizer) -> None:
    first, second, none, last = linked_texts(text, corpus, tokenizer)
    assert first == [("Ein", "A"), ("Hund", "dog"), ("rennt", "runs"), (".", ".")]
    assert second == [("Draußen", "outside"), ("zwei", "Two"), ("Männer", "men")]
    assert (none, last) == ([], [("Hallo", "Hello")])
    longest = max(map(len, encode(tokenizer, list(corpus.train))[3]))
    assert linked_texts(text, corpus, tokenizer, longest)[-1] == last  # pairs that are too long are no examples


def test_a_divided_file_has_links_for_all_its_lines(tmp_path: Path, tokenizer: Tokenizer) -> None:
    rows = [f"{'dog ' * (number % 7)}{number}\t{'Hund ' * (number % 5)}{number}" for number in range(60)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["source\ttarget", *rows]) + "\n", encoding="utf-8")
    corpus = open_corpus(tmp_path / "pairs.tsv", Reading("translation"))
    found = linked_texts("".join(f"{i % 7}-{i % 5}\n" for i in range(60)), corpus, tokenizer)  # of the numbers
    assert 0 < len(found) < 60
    assert all(text.isdigit() for pairs in found for pair in pairs for text in pair)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0-0\n", "train.align has too few lines; line N must have the links of pair N of train.en and train.de"),
        (f"{WORDS}\n", "train.align has more than 5 lines; line N must have the links of pair N"),
        ("0-0\n0-0 1:2\n\n\n\n", "train.align, line 2 has other words than links such as 0-0 1-2; line N must"),
        (
            "\n\n\n4-4\n\n",
            "train.align, line 4: a link is beyond the words of the pair, which whitespace separates",
        ),
    ],
)
def test_a_file_of_other_pairs_is_an_error(text: str, message: str, corpus: Corpus, tokenizer: Tokenizer) -> None:
    with pytest.raises(CorpusError) as error:
        linked_texts(text, corpus, tokenizer)
    assert message in str(error.value)
