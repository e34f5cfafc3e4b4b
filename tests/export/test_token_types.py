"""The separator gives the token types of the tokenizers library."""

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from sightline.export.families.token_types import PairsUnsupportedError, type_separator
from sightline.export.import_errors import ImportFailedError
from tests.zoo.comparing import SEP, token_types

SPECIAL = [("[CLS]", 101), ("[SEP]", SEP), ("<s>", 0), ("</s>", 2)]
PAIR = "[CLS] $A [SEP] $B:1 [SEP]:1"


def make_tokenizer(processor: Any) -> Tokenizer:
    words = {f"word{number}": number for number in range(200)} | dict(SPECIAL)
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word5"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if processor is not None:
        tokenizer.post_processor = processor
    return tokenizer


def template(single: str, pair: str) -> Any:
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=SPECIAL)


def separator_of(processor: Any, input_names: Sequence[str] | None = None) -> int | None:
    return type_separator(make_tokenizer(processor), input_names)


@pytest.mark.parametrize(
    "processor",
    [
        processors.BertProcessing(("[SEP]", SEP), ("[CLS]", 101)),
        template("[CLS] $A [SEP]", PAIR),
        template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1"),
        processors.Sequence([processors.ByteLevel(), template("[CLS] $A [SEP]", PAIR)]),
    ],
    ids=["BERT", "template", "without last separator", "sequence"],
)
def test_types_after_separator(processor: Any) -> None:
    assert separator_of(processor) == SEP
    tokenizer = make_tokenizer(processor)
    for texts in (("word1 word2",), ("word1 word2", "word3 word4 word5"), ("", "word3"), ("word1", "")):
        encoding = tokenizer.encode(*texts)
        assert token_types(encoding.ids) == encoding.type_ids


@pytest.mark.parametrize(
    "processor",
    [processors.RobertaProcessing(("</s>", 2), ("<s>", 0)), template("<s> $A </s>", "<s> $A </s> </s> $B </s>")],
    ids=["RoBERTa", "template"],
)
def test_all_types_are_zero(processor: Any) -> None:
    assert separator_of(processor) is None
    assert not any(make_tokenizer(processor).encode("word1", "word2").type_ids)


def test_inputs_without_token_types() -> None:
    assert separator_of(template("[CLS] $A [SEP]", PAIR), ["input_ids", "attention_mask"]) is None
    assert separator_of(template("[CLS] $A [SEP]", PAIR), ["input_ids", "token_type_ids"]) == SEP


@pytest.mark.parametrize(
    "processor",
    [
        template("$A [SEP] [CLS]:2", "$A [SEP] $B:1 [SEP]:1 [CLS]:2"),
        template("[CLS] $A", "[CLS] $A $B:1"),
        template("[SEP] $A [SEP]", "[SEP] $A [SEP] $B:1 [SEP]:1"),
    ],
    ids=["XLNet", "no separator", "separator first"],
)
def test_other_rules_are_rejected(processor: Any) -> None:
    with pytest.raises(ImportFailedError, match="token types of text pairs are not supported"):
        separator_of(processor)


@pytest.mark.parametrize("processor", [None, processors.ByteLevel()])
def test_pairs_need_separators(processor: Any) -> None:
    for tokenizer in (None, make_tokenizer(processor)):
        with pytest.raises(PairsUnsupportedError, match="that the post_processor adds"):
            type_separator(tokenizer)
