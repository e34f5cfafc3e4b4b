"""Tags of tokens, from entities and back."""

import pytest
from tokenizers import Tokenizer

from sightline.model.data.records import Entity, TaggedRecord
from sightline.model.data.tagged_files import CUT, tagged
from sightline.model.data.tags import NO_TAG, encode_tagged, entities_of, tags_of, windows
from sightline.model.data.tokenizer_training import train_tokenizer

TEXT = "Zoë Li 🙂 saw  New   York. She left. Then\nAnna came,  by train."
NAMES = {"Zoë Li": "PER", "New   York": "LOC", "Anna": "PER"}
RECORD = TaggedRecord(
    TEXT, tuple(Entity(TEXT.index(name), TEXT.index(name) + len(name), label) for name, label in NAMES.items())
)
TAGS = tags_of(("LOC", "PER"))


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Tokenizer whose tokens are mostly parts of words, and bytes of the emoji."""
    return train_tokenizer([TEXT.replace("🙂", "")], 290)


@pytest.mark.parametrize("max_tokens", [100, 20, 12, 2])
def test_the_tags_of_tokens_give_the_entities_again(max_tokens: int, tokenizer: Tokenizer) -> None:
    examples = encode_tagged(tokenizer, [RECORD, RECORD], TAGS, max_tokens)
    parts = [window for text in windows(tokenizer, [TEXT, TEXT], max_tokens) for window in text]
    assert [ids for ids, _ in examples] == [window.ids for window in parts]
    assert max(len(ids) for ids, _ in examples) <= max_tokens
    whole = [id_ for ids, _ in examples for id_ in ids[:-1]]  # without the end tokens
    assert whole == 2 * list(tokenizer.encode(TEXT).ids[:-1])
    assert all(indices[-1] == NO_TAG not in indices[:-1] for _, indices in examples)
    found = [
        entity
        for window, (_, indices) in zip(parts, examples, strict=True)
        for entity in entities_of(window, [TAGS[index - 1] if index else "O" for index in indices])
    ]
    covered = "".join(TEXT[entity.start : entity.end] for entity in found)
    expected = 2 * "".join(TEXT[entity.start : entity.end] for entity in RECORD.entities)
    assert "".join(covered.split()) == "".join(expected.split())
    if max_tokens == 100:
        assert found == 2 * list(RECORD.entities)


def test_a_long_text_is_divided_at_the_end_of_a_sentence_or_between_words(tokenizer: Tokenizer) -> None:
    starts = list[str]()
    for max_tokens in (30, 22):
        ((_, second, *_),) = windows(tokenizer, [TEXT], max_tokens)
        (start, _) = second.ranges[0] or (0, 0)
        starts.append(TEXT[start - 2 : start])
    assert starts == ["n\n", ". "]


def test_a_token_has_the_tag_of_an_entity_of_which_it_has_a_part(tokenizer: Tokenizer) -> None:
    record = TaggedRecord("She left", (Entity(1, 2, "PER"),))
    ((ids, indices),) = encode_tagged(tokenizer, [record], TAGS, 100)
    inside = [tokenizer.decode([id_]) for id_, index in zip(ids, indices, strict=True) if index > 1]
    assert "h" in "".join(inside)
    assert tagged(record.text, record.entities).notes == (CUT,)
    assert tagged(TEXT, RECORD.entities) == RECORD
    assert not tagged("我在北京。", [Entity(2, 4, "LOC")]).notes
