"""Tokenizers of checkpoints, compared with those of transformers."""

import io
import json
import random
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from sightline.base.text.tokenizer import TextTokenizer
from sightline.export.check.serving import TEXTS as ODD_TEXTS
from sightline.export.import_errors import ImportFailedError
from sightline.export.tokenizers import CONVERSIONS, ConvertedTokenizers, firefox_tokenizer, read_or_convert_tokenizers
from sightline.export.tokenizers.language_tokens import M2M100, MBART, MBART_50, language_ids
from sightline.export.tokenizers.sentencepiece import Piece, PieceKind, SentencePieceModel
from tests.base.text.kinds import SENTENCES, byte_level
from tests.export.tokenizers.test_sentencepiece import BPE, UNIGRAM
from tests.export.tokenizers.writing import special_pieces, unigram_pieces, write_sentencepiece
from tests.support.tables import read_table

TEXTS = ["a dog", " A   Dog, abs é中文!", "", "dogs\n\ta b.", "The “dog” isn't [here]"]


@dataclass(frozen=True)
class FakeFolder:
    """Files of a checkpoint in memory."""

    model_type: str
    files: Mapping[str, Any]  # bytes, text, or an object that is written as JSON
    module: str = ""

    def bytes(self, name: str) -> bytes | None:
        if name not in self.files:
            return None
        content = self.files[name]
        if isinstance(content, bytes):
            return content
        return (content if isinstance(content, str) else json.dumps(content)).encode()

    def text(self, name: str) -> str | None:
        data = self.bytes(name)
        return None if data is None else data.decode()

    def json(self, name: str) -> Any:
        text = self.text(name)
        return None if text is None else json.loads(text)


def convert(model_type: str, **files: Any) -> ConvertedTokenizers:
    """Convert files whose names have `__` for a dot."""
    named = {name.replace("__", "."): content for name, content in files.items()}
    return read_or_convert_tokenizers(FakeFolder(model_type, named))


def ids(tokenizer: Tokenizer, text: str, pair: str | None = None) -> list[int]:
    found: list[int] = tokenizer.encode(text, pair).ids
    return found


def model_of(*special: str) -> bytes:
    return write_sentencepiece(replace(UNIGRAM, pieces=special_pieces(*special) + UNIGRAM.pieces[3:]))


FAIRSEQ = model_of("<unk>", "<s>", "</s>")


# tokenizer.json


def test_a_tokenizer_file_is_used_without_truncation_and_padding() -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=7)
    converted = convert("bert", tokenizer__json=tokenizer.to_str())
    tokenizer.no_truncation()
    tokenizer.no_padding()
    assert converted.source is converted.target
    assert converted.source.to_str() == tokenizer.to_str()
    assert converted.language_ids == {}


def test_a_multilingual_tokenizer_adds_only_the_end_token() -> None:
    """The language comes from the manifest."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["eng_Latn", "zho_Hans", "zho_Hant"])
    first = tokenizer.token_to_id("eng_Latn")
    assert first is not None
    converted = convert("m2m_100", tokenizer__json=tokenizer.to_str())
    encoded = ids(converted.source, "a dog")
    assert encoded == [*tokenizer.encode("a dog", add_special_tokens=False).ids, tokenizer.token_to_id("</s>")]
    assert converted.language_ids == {"en": first, "zh-Hans": first + 1, "zh-Hant": first + 2}


def test_files_are_read_from_the_folder_of_the_transformer() -> None:
    files = {"0_Transformer/tokenizer.json": byte_level().to_str()}
    folder = FakeFolder("bert", files, module="0_Transformer/")
    assert read_or_convert_tokenizers(folder).source.to_str() == byte_level().to_str()


# Conversions


WORDS = [
    *("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "dog", "##s", "##og"),
    *(",", "!", "é", "e", "中", "[", "]", "A"),
]


@pytest.mark.parametrize(
    "options",
    [{}, {"do_lower_case": False}, {"strip_accents": False}, {"tokenize_chinese_chars": False, "strip_accents": True}],
    ids=str,
)
def test_word_pieces_have_the_ids_of_transformers(tmp_path: Path, options: dict[str, bool]) -> None:
    from transformers import BertTokenizer

    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    expected = BertTokenizer.from_pretrained(tmp_path)
    converted = convert("bert", vocab__txt="\n".join(WORDS) + "\n", tokenizer_config__json=options)
    for text in TEXTS:
        assert ids(converted.source, text) == expected(text)["input_ids"]
        assert ids(converted.source, text, "a dog") == expected(text, "a dog")["input_ids"]


def test_mpnet_has_another_template() -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "[UNK]", "a", "dog", "<mask>"]
    converted = convert("mpnet", vocab__txt="\r\n".join(words))
    assert ids(converted.source, "a", "dog cat") == [0, 5, 2, 2, 6, 4, 2]


@pytest.mark.parametrize("model_type", ["gpt2", "roberta", "bart"])
def test_byte_level_vocabularies_have_the_ids_of_transformers(tmp_path: Path, model_type: str) -> None:
    from transformers import BartTokenizer, GPT2Tokenizer, RobertaTokenizer

    original = json.loads(byte_level().to_str())["model"]
    vocabulary = dict(original["vocab"])
    for name in ("<mask>", "<|endoftext|>"):
        vocabulary[name] = len(vocabulary)
    merges = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in original["merges"])
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "merges.txt").write_text(merges)
    kind = {"gpt2": GPT2Tokenizer, "roberta": RobertaTokenizer, "bart": BartTokenizer}[model_type]
    expected = kind.from_pretrained(tmp_path)
    converted = convert(model_type, vocab__json=vocabulary, merges__txt=merges)
    for text in TEXTS:
        assert ids(converted.source, text) == expected(text)["input_ids"]
        assert ids(converted.source, text, "a dog") == expected(text, "a dog")["input_ids"]


SHORT_TEXTS = [text for text in ODD_TEXTS if len(text) < 100]
OPT = {
    "tokenizer_class": "GPT2Tokenizer", "add_bos_token": True,
    "bos_token": {"__type": "AddedToken", "content": "</s>", "normalized": True},
    "eos_token": "</s>", "unk_token": "</s>", "pad_token": "<pad>",
}  # fmt: skip


def random_merges(draw: random.Random) -> tuple[dict[str, int], str]:
    """Return a random vocabulary with special tokens, and its merges as a text."""
    tokens, merges = sorted(pre_tokenizers.ByteLevel.alphabet()), ""
    while len(tokens) < 600:
        left, right = (draw.choice(tokens[draw.choice([65, 0]) :]) for _ in range(2))
        if left + right not in tokens:
            tokens.append(left + right)
            merges += f"{left} {right}\n"
    return {token: id_ for id_, token in enumerate(["<s>", "<pad>", "</s>", *tokens, "<mask>"])}, merges


@pytest.mark.parametrize(
    "options",
    [OPT, OPT | {"add_eos_token": True, "add_prefix_space": True}, OPT | {"add_bos_token": False, "bos_token": "<s>"}],
    ids=["published", "with an end", "without a start"],
)
@pytest.mark.parametrize("is_map", [False, True], ids=["tokenizer_config.json", "special_tokens_map.json"])
def test_opt_has_the_ids_of_transformers(tmp_path: Path, options: dict[str, Any], is_map: bool) -> None:
    from transformers import AutoTokenizer

    draw = random.Random(str(options))
    vocabulary, merges = random_merges(draw)
    files: dict[str, Any] = {"vocab.json": vocabulary, "merges.txt": f"#version: 0.2\n{merges}"}
    files |= {"config.json": {"model_type": "opt"}, "tokenizer_config.json": options}
    if is_map:
        files["special_tokens_map.json"] = {"bos_token": {"content": "<pad>"}, "eos_token": "</s>"}
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    expected = AutoTokenizer.from_pretrained(tmp_path)
    converted = read_or_convert_tokenizers(FakeFolder("opt", files)).source
    for text in [*TEXTS, *SHORT_TEXTS, *("".join(draw.choices("aeint äß\n\t.'s 中🙂", k=20)) for _ in range(200))]:
        assert ids(converted, text) == expected(text)["input_ids"], text
        assert ids(converted, text, "a dog") == expected(text, "a dog")["input_ids"], text
    assert {token.content for token in converted.get_added_tokens_decoder().values()} == set(
        expected.all_special_tokens
    )


@pytest.mark.parametrize("lowercase", [False, True])
def test_deberta_has_the_ids_of_sentencepiece_and_of_transformers(tmp_path: Path, lowercase: bool) -> None:
    """Transformers 5 normalizes texts in its own way, so that only other texts are compared."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")
    from transformers import AutoTokenizer

    trained = io.BytesIO()
    names = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]", "unk_piece": "[UNK]"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4), model_writer=trained, model_type="unigram", vocab_size=120,
        hard_vocab_limit=False, minloglevel=2, normalization_rule_name="nmt_nfkc",
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, **names,
    )  # fmt: skip
    data = trained.getvalue()
    options = {"do_lower_case": lowercase, "vocab_type": "spm"}  # as in the repositories, with the first key
    (tmp_path / "spm.model").write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "deberta-v2"}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    expected = AutoTokenizer.from_pretrained(tmp_path)
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    converted = convert("deberta-v2", spm__model=data, tokenizer_config__json=options).source
    assert converted.token_to_id("[MASK]") == expected.mask_token_id == processor.get_piece_size()
    served = TextTokenizer(converted)
    draw = random.Random(7)
    texts = [*SENTENCES, *TEXTS, *SHORT_TEXTS, *("".join(draw.choices("aeint äß\n.ﬁ…", k=12)) for _ in range(300))]
    compared = 0
    for text in texts:
        given = text.lower() if lowercase else text
        if not any(map(unicodedata.combining, unicodedata.normalize("NFC", text))) and "[CLS]" not in text:
            assert served.encode(text) == [1, *processor.encode(given), 2], text
        if unicodedata.is_normalized("NFKC", text) and text.isprintable() and "▁" not in text and "\ufffd" not in text:
            assert ids(converted, text) == expected(text)["input_ids"], text
            assert ids(converted, text, "a dog") == expected(text, "a dog")["input_ids"], text
            compared += 1
    assert compared > 20
    assert converted.encode("a", "b").type_ids == expected("a", "b")["token_type_ids"]


QWEN_TEXTS = ["It's 123  A\n\n dog's", "cafe\u0301 ÉTÉ", "x\t\ty  \n z?!\n", "<|im_start|>user\n<tool_call>a</s>"]


@pytest.mark.parametrize("is_listed", [False, True], ids=["added_tokens_decoder", "added_tokens.json"])
def test_qwen_has_the_ids_of_transformers(tmp_path: Path, is_listed: bool) -> None:
    from transformers import Qwen2Tokenizer

    original = json.loads(byte_level().to_str())["model"]
    vocabulary = original["vocab"]
    merges = "#version: 0.2\n" + "".join(f"{left} {right}\n" for left, right in original["merges"])
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>"]
    added = {name: len(vocabulary) + index for index, name in enumerate(names)}
    decoder = {
        str(id_): {"content": name, "special": name != "<tool_call>", "normalized": False, "lstrip": False}
        for name, id_ in added.items()
    }
    files: dict[str, Any] = {
        "vocab.json": vocabulary,
        "merges.txt": merges,
        "tokenizer_config.json": {"added_tokens_decoder": decoder, "tokenizer_class": "Qwen2Tokenizer"},
    }
    if is_listed:
        files["added_tokens.json"] = added
    for name, content in files.items():
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    expected = Qwen2Tokenizer.from_pretrained(tmp_path)
    for model_type in ("qwen2", "qwen3"):
        converted = read_or_convert_tokenizers(FakeFolder(model_type, files)).source
        for text in [*TEXTS, *QWEN_TEXTS]:
            assert ids(converted, text) == expected(text)["input_ids"], text
        special = {token.content: token.special for token in converted.get_added_tokens_decoder().values()}
        assert special == {name: name != "<tool_call>" for name in names}


def test_the_extra_ids_of_t5_are_last_and_in_descending_order() -> None:
    converted = convert("t5", spiece__model=model_of("<pad>", "</s>", "<unk>"))
    size = len(UNIGRAM.pieces)
    assert converted.source.token_to_id("<extra_id_99>") == size
    assert converted.source.token_to_id("<extra_id_0>") == size + 99
    assert ids(converted.source, "a", "b") == [8, 1, 3, 5, 1]
    other = convert("mt5", spiece__model=model_of("<pad>", "</s>", "<unk>"))
    assert other.source.get_vocab_size() == size


def test_albert_normalizes_its_texts() -> None:
    pieces = special_pieces("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]") + unigram_pieces("▁", "a", "e", '"', "d")
    data = write_sentencepiece(replace(UNIGRAM, pieces=pieces))
    converted = convert("albert", spiece__model=data)
    assert ids(converted.source, "Éa ``D''") == [2, 5, 7, 6, 5, 8, 9, 8, 3]
    kept = convert("albert", spiece__model=data, tokenizer_config__json={"do_lower_case": False, "keep_accents": True})
    assert ids(kept.source, "éD") == [2, 5, 1, 3]


def test_pegasus_has_the_ids_of_its_pieces_after_103_others() -> None:
    converted = convert("pegasus", spiece__model=model_of("<pad>", "</s>", "<unk>"))
    assert ids(converted.source, "a 中") == [8 + 103, 3 + 103, 2 + 103, 1]
    names = [converted.source.id_to_token(id_) for id_ in (0, 1, 2, 3, 4, 104, 105)]
    assert names == ["<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_102>", "<unk>"]


def test_llama_starts_with_the_start_token() -> None:
    data = write_sentencepiece(BPE)
    assert ids(convert("llama", tokenizer__model=data).source, "a dog") == [1, 3, 6]
    options = {"add_bos_token": False, "add_eos_token": True}
    assert ids(convert("llama", tokenizer__model=data, tokenizer_config__json=options).source, "a dog") == [3, 6, 2]


def test_xlm_roberta_has_the_ids_of_fairseq() -> None:
    converted = convert("xlm-roberta", sentencepiece__bpe__model=FAIRSEQ)
    assert ids(converted.source, "a 中", "b") == [0, 9, 4, 3, 2, 2, 4, 6, 2]
    assert converted.source.token_to_id("<mask>") == len(UNIGRAM.pieces) + 1


@pytest.mark.parametrize(("options", "codes"), [({}, MBART), ({"tokenizer_class": "MBart50Tokenizer"}, MBART_50)])
def test_mbart_has_its_languages_after_the_pieces(options: dict[str, str], codes: list[str]) -> None:
    converted = convert("mbart", sentencepiece__bpe__model=FAIRSEQ, tokenizer_config__json=options)
    first = len(UNIGRAM.pieces) + 1
    assert converted.source.token_to_id("<mask>") == first + len(codes)
    assert converted.language_ids["ar"] == first
    assert len(converted.language_ids) == len(codes)
    assert ids(converted.source, "a en_XX")[-1] == 2
    assert converted.language_ids["en"] not in TextTokenizer(converted.source).encode("en_XX")


def test_nllb_reads_its_languages_from_the_special_tokens() -> None:
    special = {"additional_special_tokens": ["ace_Arab", "ace_Latn", {"content": "eng_Latn"}, "<extra>"]}
    converted = convert("m2m_100", sentencepiece__bpe__model=FAIRSEQ, special_tokens_map__json=special)
    first = len(UNIGRAM.pieces) + 1
    assert converted.language_ids == {"ace-Arab": first, "ace-Latn": first + 1, "en": first + 2}
    with pytest.raises(ImportFailedError, match=r"special_tokens_map\.json does not list the language tokens of NLLB"):
        convert("m2m_100", sentencepiece__bpe__model=FAIRSEQ)


def test_m2m100_has_its_ids_in_a_vocabulary() -> None:
    vocabulary = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁a": 4, "▁": 5, "b": 6}
    converted = convert("m2m_100", sentencepiece__bpe__model=FAIRSEQ, vocab__json=vocabulary)
    assert ids(converted.source, "a b") == [4, 5, 6, 2]
    assert converted.language_ids["af"] == 7
    assert converted.language_ids["nso"] == 7 + M2M100["m2m100"].index("ns")


def test_tokens_that_were_added_later_keep_their_ids() -> None:
    added = {"<b>": 18, "<a>": 17}
    converted = convert("bert", vocab__txt="\n".join(WORDS), added_tokens__json=added)
    assert [converted.source.token_to_id(token) for token in ("<a>", "<b>")] == [17, 18]
    with pytest.raises(ImportFailedError, match="the token '<a>' must have the id 17 after the vocabulary, got 99"):
        convert("bert", vocab__txt="\n".join(WORDS), added_tokens__json={"<a>": 99})


# Marian

SOURCE = replace(
    UNIGRAM, pieces=special_pieces("<unk>", "<s>", "</s>") + unigram_pieces("▁", "▁a", "a", "b", "d", "▁dog")
)
TARGET = replace(
    UNIGRAM, pieces=special_pieces("<unk>", "<s>", "</s>") + unigram_pieces("▁", "▁ein", "e", "d", "▁Hund")
)
MARIAN = [
    *("</s>", "<unk>", "▁Hund", "▁a", "▁", "e", "d", "▁dog"),
    *(">>fra<<", ">>pt_br<<", ">>pt<<", "▁ein", "b", "a", "<pad>"),
]
MARIAN_IDS = {piece: id_ for id_, piece in enumerate(MARIAN)}


def marian(**files: Any) -> ConvertedTokenizers:
    spm = {"source__spm": write_sentencepiece(SOURCE), "target__spm": write_sentencepiece(TARGET)}
    return convert("marian", **spm, vocab__json=MARIAN_IDS, **files)


def test_marian_has_two_tokenizers_with_the_ids_of_one_vocabulary() -> None:
    converted = marian()
    assert ids(converted.source, ">>fra<< a dog ein") == [8, 3, 7, 4, 1, 0]
    assert ids(converted.target, "ein Hund dog") == [11, 2, 4, 6, 1, 0]
    target = TextTokenizer(converted.target)
    assert target.decode([11, 2, 7, 0, 14]) == "ein Hund dog"  # also pieces of the source
    assert converted.language_ids == {"fr": 8, "pt-BR": 9, "pt": 10}


def test_marian_can_have_a_vocabulary_for_each_language() -> None:
    vocabulary = {piece: id_ for id_, piece in enumerate(["</s>", "<unk>", "▁ein", "▁Hund", "▁", "d", "e", "<pad>"])}
    converted = marian(target_vocab__json=vocabulary)
    assert ids(converted.target, "ein Hund") == [2, 3, 0]
    assert ids(converted.source, "a dog") == [3, 7, 0]
    assert converted.language_ids == {}


def test_marian_has_the_ids_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")
    from transformers import MarianTokenizer

    (tmp_path / "source.spm").write_bytes(write_sentencepiece(SOURCE))
    (tmp_path / "target.spm").write_bytes(write_sentencepiece(TARGET))
    (tmp_path / "vocab.json").write_text(json.dumps(MARIAN_IDS))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    expected = MarianTokenizer.from_pretrained(tmp_path)
    converted = marian()
    for text in [*TEXTS, "dog ein Hund a", ">>fra<< a dog", ">>pt<<dog"]:
        assert ids(converted.source, text) == expected(text)["input_ids"], text
    for text in ["ein  Hund", "Hund 中 d e", "", " ein"]:
        assert ids(converted.target, text) == expected(text_target=text)["input_ids"], text


# Firefox


def test_a_firefox_vocabulary_keeps_its_ids_and_ends_with_the_end_token() -> None:
    pieces = special_pieces("</s>", "<unk>") + unigram_pieces("▁", "▁a", "a")
    tokenizer = firefox_tokenizer(write_sentencepiece(replace(UNIGRAM, pieces=pieces)), "vocab.ende.spm")
    assert ids(tokenizer, "a aa") == [3, 3, 4, 0]


@pytest.mark.parametrize("mark", ["\xad", "\u200b", "\u2060\ufeff", "\u200e", "\u202a", "\u200d", "\u034f"])
def test_a_firefox_model_does_not_see_invisible_characters(mark: str) -> None:
    pieces = special_pieces("</s>", "<unk>") + unigram_pieces("▁", "▁ab", "a", "b", "я", "\u0645", "\u200c")
    tokenizer = firefox_tokenizer(write_sentencepiece(replace(UNIGRAM, pieces=pieces)), "vocab.ende.spm")
    text = f"a{mark}b{mark} я{mark}"
    assert ids(tokenizer, text) == ids(tokenizer, "ab я")
    spans = [(text[span.start : span.end], span.is_special) for span in TextTokenizer(tokenizer).encode_spans(text)]
    assert [part.replace(mark, "") for part, is_special in spans if not is_special] == ["ab", " ", "я"]
    assert ids(tokenizer, "\u0645\u200c\u0645") == [2, 7, 8, 7, 0]  # Persian writes it


def test_a_firefox_vocabulary_without_an_end_token() -> None:
    model = SentencePieceModel((Piece("<unk>", 0.0, PieceKind.UNKNOWN), Piece("a", -1.0)))
    with pytest.raises(ImportFailedError, match=r"vocab\.ende\.spm has no piece '</s>', which ends a text"):
        firefox_tokenizer(write_sentencepiece(model), "vocab.ende.spm")


# Errors


CONTENTS = {"WORDS": "\n".join(WORDS), "FAIRSEQ": FAIRSEQ, "OPT": OPT, "NOT UTF-8": b"\xff"}


@pytest.mark.parametrize("model_type", [*CONVERSIONS, "marian"])
def test_each_conversion_names_the_file_that_is_missing(model_type: str) -> None:
    extra = {"special_tokens_map.json": {"additional_special_tokens": ["eng_Latn"]}}
    with pytest.raises(ImportFailedError, match=r"the checkpoint has no tokenizer\.json and no [a-z.]+, from which"):
        read_or_convert_tokenizers(FakeFolder(model_type, extra))


@pytest.mark.parametrize(
    ("model_type", "files", "message"),
    read_table(__file__),
)
def test_errors(model_type: str, files: dict[str, Any], message: str) -> None:
    files = {name: CONTENTS.get(str(content), content) for name, content in files.items()}
    with pytest.raises(ImportFailedError, match=message):
        read_or_convert_tokenizers(FakeFolder(model_type, files))


# Languages


def test_tags_of_language_tokens() -> None:
    assert language_ids({"eng_Latn": 1, "arb_Arab": 2, "acm_Arab": 3, "cmn": 4}) == {"en": 1, "ar": 2, "acm": 3}
    assert language_ids({"__zh__": 5, "__ns__": 6, "__unk__x": 7}) == {"zh": 5, "nso": 6}
    assert language_ids({">>cmn_Hans<<": 1, ">>cmn_hant<<": 2, ">>sr_Cyrl<<": 3}) == {
        "zh-Hans": 1,
        "zh-Hant": 2,
        "sr": 3,
    }
    assert language_ids({"dog": 1}) == {}


def test_languages_of_transformers() -> None:
    pytest.importorskip("sentencepiece", reason="the package sentencepiece is not installed")  # transformers needs it
    from transformers.models.m2m_100 import tokenization_m2m_100
    from transformers.models.mbart import tokenization_mbart
    from transformers.models.mbart50 import tokenization_mbart50
    from transformers.models.nllb import tokenization_nllb

    assert tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES == M2M100
    assert tokenization_mbart.FAIRSEQ_LANGUAGE_CODES == MBART
    assert tokenization_mbart50.FAIRSEQ_LANGUAGE_CODES == MBART_50
    codes = tokenization_nllb.FAIRSEQ_LANGUAGE_CODES
    tags = language_ids({code: id_ for id_, code in enumerate(codes)})
    assert len(tags) == len(codes)
    assert tags["de"] == codes.index("deu_Latn")
    assert tags["zh-Hant"] == codes.index("zho_Hant")
