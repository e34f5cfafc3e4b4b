import contextlib
import io
import random
import unicodedata
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer

from sightline.base.text.tokenizer import TextTokenizer
from sightline.export.import_errors import ImportFailedError
from sightline.export.tokenizers.sentencepiece import (
    Piece,
    PieceKind,
    SentencePieceModel,
    convert_sentencepiece,
    read_sentencepiece,
)
from tests.base.text.kinds import SENTENCES
from tests.export.tokenizers.writing import (
    bpe_pieces,
    data,
    number,
    special_pieces,
    unigram_pieces,
    varint,
    write_sentencepiece,
)
from tests.support.tables import read_table

SPECIAL = special_pieces("<unk>", "<s>", "</s>")
UNIGRAM = SentencePieceModel(
    SPECIAL + unigram_pieces("▁", "a", "b", "s", "d", "▁a", "▁do", "og", "ab", "▁abs", "<", ">", "/", "</", "é", ".")
)
BPE = SentencePieceModel(
    SPECIAL + bpe_pieces("▁a", "og", "▁d", "▁dog", "ab", "abs", "▁", "a", "b", "s", "d", "o", "g", "<", ">", "/"),
    is_bpe=True,
)
BYTES = tuple(Piece(f"<0x{byte:02X}>", 0.0, PieceKind.BYTE) for byte in range(256))
SYMBOL = Piece("<sep>", 0.0, PieceKind.USER_DEFINED)
MODELS = {
    "unigram": UNIGRAM,
    "unigram without prefix": replace(UNIGRAM, add_dummy_prefix=False),
    "unigram with all spaces": replace(UNIGRAM, remove_extra_whitespaces=False),
    "unigram with bytes": replace(UNIGRAM, pieces=UNIGRAM.pieces + BYTES, byte_fallback=True),
    "unigram with a symbol": replace(UNIGRAM, pieces=(*UNIGRAM.pieces, SYMBOL)),
    "unigram with an unused piece": replace(
        UNIGRAM, pieces=(*UNIGRAM.pieces, Piece("dog", -0.1, PieceKind.UNUSED), Piece("▁b", -99.0, PieceKind.UNUSED))
    ),
    "unigram over words": replace(UNIGRAM, pieces=UNIGRAM.pieces + unigram_pieces("a▁dog", "▁▁")),
    "bpe": BPE,
    "bpe with bytes": replace(BPE, pieces=BPE.pieces + BYTES, byte_fallback=True),
    "bpe with all spaces": replace(BPE, remove_extra_whitespaces=False),
}
# Pieces by the `sentencepiece` package, which `test_golden_pieces_are_those_of_the_package` checks.
GOLDEN = read_table(__file__)


@cache
def converted(kind: str) -> tuple[TextTokenizer, Tokenizer]:
    """Return the service's tokenizer, which excludes special tokens from texts."""
    tokenizer = convert_sentencepiece(read_sentencepiece(write_sentencepiece(MODELS[kind]), kind))
    return TextTokenizer(Tokenizer.from_str(tokenizer.to_str())), tokenizer


def pieces(kind: str, ids: list[int]) -> str:
    return " ".join(MODELS[kind].pieces[id_].text for id_ in ids)


def package(model: bytes) -> Any:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")
    return sentencepiece.SentencePieceProcessor(model_proto=model)


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_read_as_it_was_written(kind: str) -> None:
    read = read_sentencepiece(write_sentencepiece(MODELS[kind]), kind)
    assert [piece.text for piece in read.pieces] == [piece.text for piece in MODELS[kind].pieces]
    assert [piece.score for piece in read.pieces] == pytest.approx([piece.score for piece in MODELS[kind].pieces])
    assert replace(read, pieces=()) == replace(MODELS[kind], pieces=())


@pytest.mark.parametrize(("kind", "text", "expected"), GOLDEN)
def test_golden_pieces(kind: str, text: str, expected: str) -> None:
    assert pieces(kind, converted(kind)[0].encode(text)) == expected


@pytest.mark.parametrize(("kind", "text", "expected"), GOLDEN)
def test_golden_pieces_are_those_of_the_package(kind: str, text: str, expected: str) -> None:
    ids = package(write_sentencepiece(MODELS[kind])).encode(text)
    assert pieces(kind, ids) == expected


@pytest.mark.parametrize("kind", MODELS)
def test_random_texts_have_the_ids_of_the_package(kind: str) -> None:
    processor, (tokenizer, _) = package(write_sentencepiece(MODELS[kind])), converted(kind)
    draw = random.Random(5)
    for _ in range(500):
        text = "".join(draw.choices(["a", "b", "s", "dog", " ", "▁", "é", "中", "</s>", "<sep>", "<0x0A>", "\n"], k=8))
        if "</s>" in text or ("<0x0A>" in text and not MODELS[kind].byte_fallback):
            # Names of special tokens are split after their first character, which can change the
            # pieces of what follows.
            assert not {0, 1, 2} & set(tokenizer.encode(text)) - {0}
            continue
        assert tokenizer.encode(text) == processor.encode(text), text


@pytest.mark.parametrize("kind", MODELS)
def test_random_ids_have_the_text_of_the_package(kind: str) -> None:
    processor, (tokenizer, _) = package(write_sentencepiece(MODELS[kind])), converted(kind)
    is_text = [piece.kind in (PieceKind.NORMAL, PieceKind.USER_DEFINED) for piece in MODELS[kind].pieces]
    draw = random.Random(6)
    for _ in range(200):
        ids = [id_ for id_ in draw.choices(range(len(is_text)), k=8) if is_text[id_]]
        # The package removes all leading spaces, not one, if it also merges spaces.
        assert tokenizer.decode(ids).lstrip(" ") == processor.decode(ids).lstrip(" ")


@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}, {"normalization_rule_name": "nmt_nfkc_cf"}], ids=str)
def test_a_trained_model_has_the_ids_of_the_package(model_type: str, options: dict[str, Any]) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=trained,
        model_type=model_type,
        vocab_size=400 if "byte_fallback" in options else 120,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    tokenizer = TextTokenizer(convert_sentencepiece(read_sentencepiece(trained.getvalue(), "trained")))
    draw = random.Random(7)
    texts = [*SENTENCES, *map(str.upper, SENTENCES)]
    alphabet = "aeinst MßÄ,.\u3000ﬁ①½\u00a0\t\n中🙂▁ＡＢ…\u200b"
    texts += ["".join(draw.choices(alphabet, k=draw.randrange(12))) for _ in range(500)]
    for text in texts:
        if not any(map(unicodedata.combining, unicodedata.normalize("NFC", text))):
            assert tokenizer.encode(text) == processor.encode(text), text


def test_offsets_are_those_of_the_original_text() -> None:
    spans = converted("unigram")[0].encode_spans("  abs  dog.")
    assert [(span.start, span.end) for span in spans] == [(2, 5), (6, 7), (7, 8), (8, 10), (10, 11)]


def test_pieces_of_another_language_keep_their_id_and_are_never_found() -> None:
    ids = {"</s>": 0, "<unk>": 1, "▁hund": 2, "▁do": 3, "og": 4, "▁": 5, "d": 6, "▁a": 7, "<pad>": 8}
    tokenizer = convert_sentencepiece(UNIGRAM, ids, special=["<pad>"])
    served = TextTokenizer(tokenizer)
    assert served.encode("a hund d") == [7, 5, 1, 6, 5, 6]
    assert served.decode([2, 7, 2]) == "hund a hund"
    assert served.special_ids == {0, 1, 8}


@pytest.mark.parametrize("kind", ["unigram", "bpe with bytes"])
def test_a_truncated_file_is_an_error(kind: str) -> None:
    whole = write_sentencepiece(MODELS[kind])
    for size in [*range(60), *range(60, len(whole), 37), len(whole) - 1]:
        with pytest.raises(ImportFailedError, match=r"x\.spm is not a SentencePiece model that can be converted: "):
            read_sentencepiece(whole[:size] + b"\x80", "x.spm")


def test_random_bytes_cause_no_other_error() -> None:
    draw = random.Random(8)
    whole = write_sentencepiece(UNIGRAM)
    for _ in range(500):
        changed = bytearray(whole)
        for _ in range(3):
            changed[draw.randrange(len(whole))] = draw.randrange(256)
        with contextlib.suppress(ImportFailedError):  # another error is a defect
            read_sentencepiece(bytes(changed), "x.spm")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "it must have exactly one piece for unknown characters"),
        (data(1, data(1, b"a")) * 2, "it must have exactly one piece for unknown characters"),
        (data(1, data(1, b"<unk>") + number(3, 2)) + data(1, data(1, b"a")) * 2, "a piece occurs twice"),
        (data(1, data(1, b"<unk>") + number(3, 2)) + data(2, number(3, 4)), "its model type 4 is not supported"),
        (data(1, data(1, b"<unk>") + number(3, 2)) + data(2, number(24, 1)), "treat_whitespace_as_suffix"),
        (data(1, data(1, b"<unk>") + number(3, 2)) + data(3, number(5, 0)), "escape_whitespaces must be true"),
        (data(1, data(1, b"<unk>") + number(3, 9)), "9 is not a valid PieceKind"),
        (data(1, data(1, b"\xff") + number(3, 2)), "it is truncated, or not one"),
        (varint(1 << 3 | 2) + varint(9), "it is truncated, or not one"),
    ],
)
def test_files_that_cannot_be_converted(content: bytes, message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        read_sentencepiece(content, "x.spm")


@pytest.mark.parametrize(
    ("model", "ids", "message"),
    [
        (UNIGRAM, {"<unk>": 0, "a": 2}, "the vocabulary of 2 tokens must have the ids 0 to 1, each of them once"),
        (UNIGRAM, {"a": 0}, "the vocabulary has no token '<unk>', which the tokenizer needs"),
        (
            replace(BPE, pieces=(*BPE.pieces, Piece("x", 0.0, PieceKind.UNUSED))),
            None,
            "with an unused piece such as 'x'",
        ),
        (replace(BPE, pieces=(*BPE.pieces, Piece("xy", 0.0, PieceKind.UNUSED))), None, "an unused piece such as 'xy'"),
        (replace(UNIGRAM, pieces=(*UNIGRAM.pieces, Piece("x", float("nan")))), None, "score that is not a finite numb"),
    ],
)
def test_vocabularies_that_do_not_fit(model: SentencePieceModel, ids: dict[str, int] | None, message: str) -> None:
    with pytest.raises(ImportFailedError, match=message):
        convert_sentencepiece(model, ids)
