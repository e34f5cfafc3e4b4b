"""Texts with masks have the tokens that the `tokenizers` library gives them."""

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer

from sightline.base.text.tokenizer import TextTokenizer
from tests.base.text.kinds import byte_level, metaspace, word_piece


def masked(make: Callable[[], Tokenizer]) -> Tokenizer:
    tokenizer = make()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=make is not word_piece, special=True)])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, metaspace, word_piece])
@pytest.mark.parametrize("text", ["the <mask> a", "<mask> the", "a <mask><mask> b", "a  <mask>", "a<mask>b <mask> "])
def test_a_mask_is_one_token_and_takes_the_space_that_belongs_to_it(make: Callable[[], Tokenizer], text: str) -> None:
    expected = masked(make)  # learning a vocabulary twice may give two
    tokenizer = TextTokenizer(Tokenizer.from_str(expected.to_str()))
    mask_id = expected.token_to_id("<mask>")
    ids = expected.encode(text).ids
    assert mask_id is not None and tokenizer.encode_masked(text, mask_id) == ids
    assert mask_id in ids and mask_id not in tokenizer.encode(text)
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == expected.decode(ids, skip_special_tokens=skip)
