"""Masks of constraints agree with a slow search over the texts of small languages."""

import itertools
from typing import Any

import numpy as np
import pytest

from sightline.base.text.tokenizer import TextTokenizer
from sightline.service.api_errors import ApiError
from sightline.service.constraints import Constraint
from sightline.service.inference.masks import compiler_of
from tests.base.text.kinds import KINDS
from tests.service.conftest import byte_level_tokenizer
from tests.support.tables import read_table

END = 2
MORE_LOGITS = 5  # than the tokenizer has ids

# Constraints with all their texts.
WORDS = ["a dog", "Straße 12", "the man", "", " dog", "<s>", "dog</s>"]
LANGUAGES: list[tuple[dict[str, Any], list[str]]] = [
    ({"regex": "|".join(WORDS)}, WORDS),
    (
        {"regex": "( a|b/c|dé|\\[){1,3}"},
        ["".join(parts) for n in (1, 2, 3) for parts in itertools.product([" a", "b/c", "dé", "["], repeat=n)],
    ),
    (
        {"json_schema": {"enum": ["a dog", "Straße", 12, None, "<think>"]}},
        ['"a dog"', '"Straße"', "12", "null", '"<think>"'],
    ),
    ({"json_schema": {"type": "string", "const": "x"}}, ['"x"']),
    ({"lark": 'start: "dog" tail\ntail: " eats" | "s"'}, ["dog eats", "dogs"]),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("constraint", "texts"), LANGUAGES)
def test_masks_allow_the_tokens_with_which_an_allowed_text_goes_on(
    kind: str, constraint: dict[str, Any], texts: list[str]
) -> None:
    tokenizer = TextTokenizer(KINDS[kind]())
    size = len(tokenizer) + MORE_LOGITS
    compiled = compiler_of(tokenizer, size, (END,))(Constraint.model_validate(constraint))
    complete = {text.encode() for text in texts}
    starts = {text[:end] for text in complete for end in range(len(text) + 1)}

    def text_of(ids: list[int]) -> bytes:
        text, is_first = b"", True
        for id_ in ids:
            text += tokenizer.bytes_of(id_, is_first=is_first)
            is_first = False
        return text

    random = np.random.default_rng(1)
    for _ in range(4):
        matcher, ids = compiled.copy(), list[int]()
        while True:
            allowed = set(np.flatnonzero(matcher.allowed()).tolist())
            slow = {id_ for id_ in range(size) if tokenizer.adds_text(id_) and text_of([*ids, id_]) in starts}
            assert allowed - {END} == slow - {END}, ids
            assert matcher.is_complete == (text_of(ids) in complete)
            assert (END in allowed) == (matcher.is_complete or not slow)  # the vocabulary may lack a character
            if not slow or (matcher.is_complete and random.random() < 0.5):
                break
            ids.append(int(random.choice(sorted(slow))))
            matcher.update(ids[-1])


DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"type": "array", "items": DEEP}
# Constraints that are large, deep, ambiguous or endless.
HOSTILE: list[tuple[dict[str, Any], str | None]] = [
    ({"json_schema": DEEP}, "recursion limit exceeded"),
    (
        {"json_schema": {"allOf": 6 * [{"anyOf": [{"type": "string", "maxLength": n} for n in range(20)]}]}},
        "schema too large",
    ),
    (
        {
            "json_schema": {
                "allOf": [{"anyOf": [{"properties": {f"a{k}": {"const": n}}} for n in range(9)]} for k in range(9)]
            }
        },
        "schema too large",
    ),
    ({"json_schema": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}, None),
    ({"json_schema": {"type": "array", "minItems": 10**9}}, None),
    ({"json_schema": {"type": "string", "pattern": "(a|aa|aaa)*b" * 200}}, None),
    ({"json_schema": {"type": "string", "pattern": "([a-z]{1,1000}){1,1000}"}}, None),
    ({"regex": "(" * 5000 + ")" * 5000}, "maximum number of nested parentheses"),
    ({"regex": "(?:a?){500}a{500}"}, None),
    ({"regex": "(.*a){1000}"}, None),
    ({"lark": 'start: start start | "a" |'}, None),
    ({"lark": 'start: x{1000}\nx: y{1000}\ny: "a"{1000} "b"?'}, None),
]


@pytest.mark.parametrize(("constraint", "reason"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_constraints_are_refused_or_end(
    tokenizer: TextTokenizer, constraint: dict[str, Any], reason: str | None
) -> None:
    compiled = compiler_of(tokenizer, len(tokenizer), (END,))
    if reason is not None:
        with pytest.raises(ApiError, match=reason):
            compiled(Constraint.model_validate(constraint))
        return
    matcher = compiled(Constraint.model_validate(constraint)).copy()
    for _ in range(30):  # a state that exceeds a limit allows only the end
        ids = np.flatnonzero(matcher.allowed())
        assert len(ids)
        matcher.update(int(ids[-1]))


@pytest.mark.parametrize(("constraint", "message"), read_table(__file__))
def test_errors_name_the_reason_without_text_of_the_client(
    tokenizer: TextTokenizer, constraint: dict[str, Any], message: str
) -> None:
    with pytest.raises(ApiError) as caught:
        compiler_of(tokenizer, len(tokenizer), (END,))(Constraint.model_validate(constraint))
    assert (caught.value.code, caught.value.text, caught.value.field) == (
        "unsupported_parameter",
        message,
        "constraint",
    )


def test_only_a_special_token_is_one_in_a_grammar() -> None:
    kind = byte_level_tokenizer()
    kind.add_special_tokens(["<call>"])
    tokenizer = TextTokenizer(kind)
    special = tokenizer.special_ids - {0, 1, 2}
    grammar = Constraint.model_validate({"lark": "start: TEXT <call> %json {}\nTEXT: /(.|\\n)*/"})
    matcher = compiler_of(tokenizer, len(tokenizer), (END,))(grammar).copy()
    for id_ in tokenizer.encode("<call> is text", add_special_tokens=False):
        assert matcher.allowed()[id_]
        matcher.update(id_)
    assert set(np.flatnonzero(matcher.allowed())) & tokenizer.special_ids == special
    matcher.update(*special)
    assert not np.flatnonzero(matcher.allowed()[list(tokenizer.special_ids)]).size
