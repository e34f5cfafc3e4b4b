"""Pairs of texts equal those of transformers' fast tokenizers, truncated "longest first"."""

import itertools

import pytest
from tokenizers import Tokenizer, processors

from sightline.base.text.tokenizer import TextTokenizer
from tests.service.conftest import END, START, byte_level_tokenizer

TEXTS = ["a", "a dog", "Hund und a dog", "x" * 20]


def pair_tokenizer() -> Tokenizer:
    """Return a tokenizer that joins pairs as RoBERTa does."""
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", pair=f"{START} $A {END} {END} $B {END}", special_tokens=[(START, 1), (END, 2)]
    )
    return tokenizer


@pytest.mark.parametrize("max_tokens", [None, 5, 8, 9, 12, 13, 20])
def test_pairs_equal_those_of_transformers(max_tokens: int | None) -> None:
    from transformers import PreTrainedTokenizerFast

    own, other = TextTokenizer(pair_tokenizer()), PreTrainedTokenizerFast(tokenizer_object=pair_tokenizer())
    for first, second in itertools.product(TEXTS, repeat=2):
        options = {} if max_tokens is None else {"truncation": "longest_first", "max_length": max_tokens}
        assert own.encode_pair(first, second, max_tokens) == other(first, second, **options)["input_ids"]
