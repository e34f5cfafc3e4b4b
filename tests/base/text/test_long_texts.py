"""Tokenization takes time that grows at most in proportion to the length of a text."""

import itertools
import math
import re
import struct
import threading
import time

import pytest
from tokenizers import Regex, normalizers

from sightline.base.text.tokenizer import LONG_TEXT, MAX_CHARACTERS_PER_TOKEN, TextTokenizer
from sightline.export.tokenizers.sentencepiece import OUTER_SPACES, convert_sentencepiece
from sightline.service.api_errors import ApiError
from sightline.service.body_fields import Texts
from sightline.service.inference.call import SingleText, tokenize_within_limits
from tests.base.text.kinds import KINDS, SENTENCES
from tests.export.tokenizers.test_sentencepiece import BPE, UNIGRAM

MARKS: list[str] = [*" \t\n\u00a0\u200b▁.-'0aZßéﬁ中🙂", "\r\n", "e\u0301"]
# The start, the repeated part and the end of each kind of text.
PATTERNS = {repr(mark): ("", mark, "") for mark in MARKS}
PATTERNS |= {f"a, {mark!r}, b": ("a", mark, "b") for mark in (" ", "▁", "\n", "\t")}
PATTERNS |= {
    "sentences": ("", " ".join(SENTENCES), ""),
    "words": ("", "word ", ""),
    "long words": ("", f"{'x' * 200} ", ""),
    "spaces and marks": ("", " ▁", "a"),
    "changing case": ("", "aB", ""),
    "numbers": ("", "1234567890 ", ""),
    "special names": ("", "</s>", ""),
}


def text_of(pattern: str, size: int) -> str:
    start, part, end = PATTERNS[pattern]
    return start + part * (size // len(part)) + end


def cpu_seconds(tokenizer: TextTokenizer, text: str, limit: float = 0.0) -> float:
    """Return the least CPU time of three tokenizations, or of those until one is below `limit`."""
    least = math.inf
    for _ in range(3):
        started = time.process_time()
        tokenizer.encode(text)
        if (least := min(least, time.process_time() - started)) < limit:
            break
    return least


@pytest.fixture(scope="module")
def kinds() -> dict[str, TextTokenizer]:
    """Return one tokenizer of each kind, those of converted SentencePiece models included."""
    converted = {
        "SentencePiece Unigram": convert_sentencepiece(UNIGRAM, special=[]),
        "SentencePiece BPE": convert_sentencepiece(BPE, special=[]),
    }
    made = {name: make() for name, make in KINDS.items()} | converted
    return {name: TextTokenizer(tokenizer) for name, tokenizer in made.items()}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_time_is_linear_in_the_length_of_a_text(kinds: dict[str, TextTokenizer], pattern: str) -> None:
    """Four times the text may take eight times as long; a quadratic rule would take sixteen."""
    for name, tokenizer in kinds.items():
        short = cpu_seconds(tokenizer, text_of(pattern, 3_000))
        long = cpu_seconds(tokenizer, text_of(pattern, 12_000), limit := 8 * short + 0.005)
        assert long < limit, f"{name}: {short:.4f} s and {long:.4f} s"


def test_the_linear_expression_of_outer_spaces_finds_the_same() -> None:
    slow, fast = (normalizers.Replace(Regex(pattern), "|") for pattern in (r"\A +|[ ▁]+\z", OUTER_SPACES))
    for length in range(8):
        for characters in itertools.product(" ▁a\n", repeat=length):
            text = "".join(characters)
            # The slow one finds spaces and marks without other characters in two parts.
            assert fast.normalize_str(text) == re.sub(r"\|+", "|", slow.normalize_str(text)), repr(text)


def test_a_text_with_many_characters_for_each_token_is_rejected_before_it_is_tokenized(
    kinds: dict[str, TextTokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 16 * MAX_CHARACTERS_PER_TOKEN
    assert limit >= LONG_TEXT
    for tokenizer in kinds.values():
        monkeypatch.setattr(tokenizer, "_tokenizer", None)
        for text in ("a" * (limit + 1), "a" + " " * limit):
            with pytest.raises(ApiError) as caught:
                tokenize_within_limits(tokenizer, [SingleText(text)], Texts.one(text).index, "inputs", [16], math.inf)
            assert (caught.value.code, caught.value.message({})) == (
                "input_too_long",
                f"It must have at most 16 tokens for this model, and so at most {limit} characters, got {limit + 1} "
                "characters; shorten or split it.",
            )
        monkeypatch.undo()


def test_a_long_text_is_tokenized_while_other_threads_run(kinds: dict[str, TextTokenizer]) -> None:
    """The longest pause of another thread is far shorter than the tokenization."""
    tokenizer, text = kinds["SentencePiece Unigram"], "a b " * 100_000
    ended = threading.Event()

    def tokenize() -> None:
        tokenizer.encode(text)
        ended.set()

    thread = threading.Thread(target=tokenize)
    started = last = time.monotonic()
    longest = 0.0
    thread.start()
    while not ended.wait(0.002):
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    thread.join()
    seconds = time.monotonic() - started
    assert longest < 0.5 * seconds, f"{longest:.3f} s of {seconds:.3f} s"


def test_a_panic_of_the_library_is_an_exception() -> None:
    tokenizer = convert_sentencepiece(UNIGRAM, special=[])
    read = TextTokenizer(tokenizer)
    tokenizer.normalizer = normalizers.Precompiled(struct.pack("<I", 4) + bytes(4))
    for text in ("ab", "ab" * LONG_TEXT):
        with pytest.raises(RuntimeError, match="the tokenizer panics: index out of bounds"):
            read.encode(text)
