"""Each kind of tokenizer that imported models have, compared with the `tokenizers` library."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from sightline.base.text.stream import TextStream
from sightline.base.text.tokenizer import CUT_TOKENS, TextTokenizer
from tests.base.text.kinds import KINDS, SENTENCES, SPECIAL, byte_fallback, byte_level, metaspace, word_piece

LIBRARY = {name: make() for name, make in KINDS.items()}
# Training is not deterministic, so both need the same file.
TOKENIZERS = {name: TextTokenizer(Tokenizer.from_str(library.to_str())) for name, library in LIBRARY.items()}
FUZZ = settings(deadline=None, derandomize=True, max_examples=30)
ALPHABET = "adeinst AMZäß.,!?'<>/\n\t🙂é中▁"
TEXTS = st.one_of(st.text(ALPHABET, max_size=40), st.text(max_size=20), st.sampled_from(SENTENCES))

of_each_kind = pytest.mark.parametrize("kind", KINDS)


def decode_slowly(kind: str, ids: list[int], skip_special_tokens: bool = True) -> str:
    """Decode with the library, after each run of bytes has been replaced by its characters."""
    library = LIBRARY[kind]
    special = {id_ for id_, added in library.get_added_tokens_decoder().items() if added.special}
    tokens: list[str] = []
    run = b""
    for id_ in ids:
        token = library.id_to_token(id_)
        if token is None or (skip_special_tokens and id_ in special):
            continue
        match = re.fullmatch("<0x(..)>", token) if kind.startswith("byte fallback") else None
        if match:
            run += bytes.fromhex(match[1])
            continue
        tokens += [run.decode("utf-8", "replace"), token] if run else [token]
        run = b""
    tokens += [run.decode("utf-8", "replace")] if run else []
    text: str = library.decoder.decode(tokens)
    return text.removeprefix(" ") if kind == "byte-level with a prefix space" else text


def streamed(text: TextStream, ids: list[int]) -> str:
    return "".join([text.push(id_) for id_ in ids]) + text.finish()


@of_each_kind
@FUZZ
@given(data=st.data())
def test_any_ids_decode_as_in_the_library(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), max_size=30))
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == decode_slowly(kind, ids, skip)


@of_each_kind
@FUZZ
@given(text=TEXTS)
def test_texts_decode_as_in_the_library(kind: str, text: str) -> None:
    """Without `decode_slowly`: bytes of a text are always valid UTF-8."""
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    expected: str = LIBRARY[kind].decode(ids)
    if kind == "byte-level with a prefix space":
        expected = expected.removeprefix(" ")
    assert tokenizer.decode(ids) == expected


@of_each_kind
@FUZZ
@given(data=st.data())
def test_pieces_join_to_the_decoded_text(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.one_of(st.lists(st.integers(0, len(tokenizer) + 2), max_size=30), TEXTS.map(tokenizer.encode)))
    size = data.draw(st.integers(0, len(ids)))
    whole = tokenizer.decode(ids)
    assert streamed(TextStream(tokenizer), ids) == whole
    assert streamed(TextStream(tokenizer, prefix=ids[:size]), ids[size:]) == whole


@of_each_kind
@FUZZ
@given(data=st.data())
def test_a_stream_ends_before_the_first_stop_string(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.one_of(st.lists(st.integers(0, len(tokenizer) - 1), max_size=30), TEXTS.map(tokenizer.encode)))
    stop = tuple(data.draw(st.lists(st.text("aeins dt.", min_size=1, max_size=3), min_size=1, max_size=3)))
    whole = tokenizer.decode(ids)
    text = TextStream(tokenizer, stop)
    found = streamed(text, ids)
    if text.has_stopped:
        assert any(whole.startswith(found + string) for string in stop)
    else:
        assert found == whole
    assert not any(string in found for string in stop)


@of_each_kind
@FUZZ
@given(text=TEXTS)
def test_spans_are_ranges_of_the_text_in_order(kind: str, text: str) -> None:
    spans = TOKENIZERS[kind].encode_spans(text)
    assert [span.id for span in spans] == TOKENIZERS[kind].encode(text)
    starts = [span.start for span in spans]
    assert starts == sorted(starts)
    covered: set[int] = set()
    for span in spans:
        assert 0 <= span.start <= span.end <= len(text)
        covered.update(range(span.start, span.end))
    # Every character that is not whitespace belongs to a token, unless normalization removes all
    # characters of its word.
    words = [match.span() for match in re.finditer(r"\S+", text)]
    for start, end in words:
        of_word = covered & set(range(start, end))
        assert not of_word or max(of_word) == end - 1


@of_each_kind
@FUZZ
@given(data=st.data())
def test_decoded_tokens_have_ranges_of_the_text(kind: str, data: st.DataObject) -> None:
    """Each range is found by decoding all bytes up to the token's first and last byte."""
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.one_of(st.lists(st.integers(0, len(tokenizer) + 2), max_size=30), TEXTS.map(tokenizer.encode)))
    expected: list[tuple[int, int] | None] = []
    before, is_first = b"", True
    for id_ in ids:
        if not tokenizer.adds_text(id_):
            expected.append(None)
            continue
        own, is_first = tokenizer.bytes_of(id_, is_first=is_first), False
        start = len((before + own[:1]).decode("utf-8", "replace")) - bool(own)
        before += own
        expected.append((start, len(before.decode("utf-8", "replace"))))
    offsets = tokenizer.decoded_offsets(ids)
    assert offsets == expected
    assert max((one[1] for one in offsets if one), default=0) == len(tokenizer.decode(ids))


@of_each_kind
# The last two are longer than the part of a text that is tokenized to its first tokens.
@pytest.mark.parametrize("text", [*SENTENCES, "A man. " * 1_000, "🙂🙂 " * 2_000])
def test_offsets_are_those_of_the_spans_also_of_a_truncated_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    spans = tokenizer.encode_spans(text)
    expected = [None if span.is_special else (span.start, span.end) for span in spans]
    assert tokenizer.offsets(text, len(spans)) == expected
    num_final = int(spans[-1].is_special)
    truncated = tokenizer.encode_truncated(text, 5)
    if len(spans) > 5:
        assert tokenizer.offsets(text, len(truncated)) == expected[: 5 - num_final] + expected[len(spans) - num_final :]


def named_spans(tokenizer: Tokenizer, text: str) -> list[tuple[str, int, int]]:
    served = TextTokenizer(tokenizer)
    return [(served.name(span.id), span.start, span.end) for span in served.encode_spans(text)]


def word_pieces(*pieces: str) -> Tokenizer:
    tokenizer = word_piece()
    vocabulary = {piece: id_ for id_, piece in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *pieces])}
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    return tokenizer


def unigram(*pieces: str) -> Tokenizer:
    tokenizer = metaspace()
    scores = [(piece, -float(rank)) for rank, piece in enumerate([*SPECIAL, *pieces])]
    tokenizer.model = models.Unigram(scores, SPECIAL.index("<unk>"))
    return tokenizer


def test_word_pieces_have_the_range_of_their_characters_without_spaces() -> None:
    """Lowercase letters without accents come from the original's; an unknown word has its range."""
    tokenizer = word_pieces("deja", "##s", "dog", "!")
    assert named_spans(tokenizer, " De\u0301jàs  中 dog!") == [
        ("[CLS]", 1, 1),
        (" deja", 1, 6),
        ("s", 6, 7),
        ("[UNK]", 9, 10),
        (" dog", 11, 14),
        ("!", 14, 15),
        ("[SEP]", 15, 15),
    ]


def test_an_unknown_word_is_no_special_token_of_the_template() -> None:
    spans = TextTokenizer(word_pieces("dog")).encode_spans("cat dog")
    assert [span.is_special for span in spans] == [True, False, False, True]


def test_the_mark_before_a_text_is_in_no_character() -> None:
    tokenizer = unigram("▁", "▁dog", "x", "s")
    assert named_spans(tokenizer, "xx  dogs") == [
        (" ", 0, 0),
        ("x", 0, 1),
        ("x", 1, 2),
        (" dog", 3, 7),
        ("s", 7, 8),
        ("</s>", 8, 8),
    ]


def test_the_bytes_of_a_character_share_its_range() -> None:
    served = TextTokenizer(byte_fallback())
    spans = [(served.bytes_of(span.id), span.start, span.end) for span in served.encode_spans("a s中")][-4:]
    assert spans == [(b" s", 1, 3), (b"\xe4", 3, 4), (b"\xb8", 3, 4), (b"\xad", 3, 4)]


@of_each_kind
@pytest.mark.parametrize("text", ["a </s> b", "</s>", "x<unk>", "[SEP] x[CLS]", "<pad><s>", "<0x0A>"])
def test_special_tokens_in_a_text_are_text(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    spans = tokenizer.encode_spans(text)
    unknown = {span.id for span in spans if tokenizer.name(span.id) in ("<unk>", "[UNK]") and not span.is_special}
    in_text = {span.id for span in spans if not span.is_special}
    assert not (in_text & tokenizer.special_ids) - unknown
    assert len([span for span in spans if span.id in unknown]) < len(text)  # unknown characters, not one name
    assert not any(tokenizer.bytes_of(id_) == b"\n" for id_ in in_text)


def test_a_unigram_model_does_not_find_its_special_tokens() -> None:
    """The library's option leaves them to the model, whose vocabulary has them."""
    tokenizer = unigram("▁", "▁a", "<", "/", "s", ">", "</", "/s", "s>")
    tokenizer.encode_special_tokens = True
    assert tokenizer.encode("a</s>").tokens == ["▁a", "</s>", "</s>"]
    served = TextTokenizer(tokenizer)
    assert [served.name(id_) for id_ in served.encode("a</s>")] == [" a", "<", "/", "s>", "</s>"]


@of_each_kind
def test_added_tokens_that_are_not_special_are_found(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert "<think>" in [tokenizer.name(id_).strip() for id_ in tokenizer.encode("a <think> man")]
    assert "<think>" in tokenizer.decode(tokenizer.encode("a <think> man"))


@of_each_kind
@FUZZ
@given(first=TEXTS, second=TEXTS, max_tokens=st.one_of(st.none(), st.integers(5, 40)))
def test_pairs_are_encoded_and_truncated_as_in_the_library(
    kind: str, first: str, second: str, max_tokens: int | None
) -> None:
    served = TOKENIZERS[kind]
    library = Tokenizer.from_str(served._tokenizer.to_str())  # with the pre-tokenizer that splits special tokens
    library.encode_special_tokens = True
    if max_tokens is not None:
        library.enable_truncation(max_tokens, strategy="longest_first")
    assert served.encode_pair(first, second, max_tokens) == library.encode(first, second).ids


def test_a_pair_that_is_cut_before_tokenization_has_the_first_tokens_of_both() -> None:
    served = TextTokenizer(word_pieces("dog", "cat"))
    whole = served.encode_pair("dog " * 3, "cat " * 30_000)
    assert served.encode_pair("dog " * 3, "cat " * 30_000, 64) == [*whole[:63], whole[-1]]


def test_a_maximum_below_the_special_tokens_of_a_pair() -> None:
    served = TextTokenizer(word_pieces("dog"))
    with pytest.raises(ValueError, match="max_tokens must be greater than the 3 special tokens of a pair"):
        served.encode_pair("dog", "dog", 3)


@of_each_kind
@pytest.mark.parametrize(
    "text", ["A man. " * 3_000, "x" * 20_000, "中" * 10_000, " " * 20_000 + "dog", "🙂🙂 " * 5_000]
)
def test_the_start_of_a_long_text_has_its_first_tokens(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    truncated = tokenizer.encode_truncated(text, 64)
    if len(ids) <= 64:
        assert truncated == ids
    else:
        num_final = int(tokenizer.encode("a")[-1] in tokenizer.special_ids)
        assert truncated == [*ids[: 64 - num_final], *ids[len(ids) - num_final :]]
    assert tokenizer.min_num_tokens(text, 64) <= len(ids)
    assert tokenizer.min_num_tokens(text, 64) > 64 or len(ids) < 64 + CUT_TOKENS + 2


def test_a_word_that_is_cut_is_not_counted_as_its_pieces() -> None:
    """WordPiece replaces words of more than 100 characters by one unknown token."""
    served = TextTokenizer(word_pieces("x", "##x"))
    text = "x" * 50 + " " + "x" * 100_000
    assert served.min_num_tokens(text, 8) == 0
    assert served.encode_truncated(text, 60)[-3:] == served.encode(text)[-3:]
    start = "x" * (8 * (8 + CUT_TOKENS) - 50)
    assert served.encode_truncated(f"{start} {'x' * 200}", 8) == served.encode(f"{start} {'x' * 200}")


def test_the_time_of_a_token_does_not_depend_on_earlier_tokens() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    byte = next(id_ for id_ in range(len(tokenizer)) if tokenizer.bytes_of(id_) == b"\xe4")
    text = TextStream(tokenizer, ["x" * 10])
    started = time.process_time()
    for _ in range(200_000):
        text.push(byte)
    assert time.process_time() - started < 10


@pytest.mark.parametrize(
    ("decoder", "step"),
    [
        (decoders.BPEDecoder(), "BPEDecoder"),
        (decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]), "Replace"),
        (decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, 1)]), "Strip"),
        (decoders.Sequence([decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]), "Strip"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]), "ByteLevel"),
    ],
)
def test_an_unsupported_decoder_is_rejected(decoder: decoders.Decoder, step: str) -> None:
    tokenizer = byte_level()
    tokenizer.decoder = decoder
    with pytest.raises(ValueError, match=f"its decoder has the step {step}, which is not supported here"):
        TextTokenizer(tokenizer)


def test_without_a_decoder_tokens_are_joined_by_spaces() -> None:
    tokenizer = unigram("▁", "▁a")
    tokenizer.decoder = None
    served = TextTokenizer(tokenizer)
    ids = served.encode("a a")
    assert served.decode(ids) == tokenizer.decode(ids) == "▁a ▁a"
    assert streamed(TextStream(served), ids) == "▁a ▁a"


def test_only_tokenizers_that_insert_a_space_remove_it() -> None:
    strips = {kind: tokenizer.strips_leading_space for kind, tokenizer in TOKENIZERS.items()}
    assert [kind for kind, is_stripped in strips.items() if not is_stripped] == [
        "byte-level",
        "metaspace never",
        "byte fallback without strip",
    ]
    assert TOKENIZERS["byte-level"].decode(TOKENIZERS["byte-level"].encode(" man")) == " man"
