import re
import sys

from sightline.service.fields import NOT_BLANK, object_schema


def test_the_pattern_of_texts_matches_texts_that_are_not_blank() -> None:
    matched = {code for code in range(sys.maxunicode + 1) if re.search(NOT_BLANK, chr(code))}
    assert matched == {code for code in range(sys.maxunicode + 1) if chr(code).strip()}


def test_an_object_schema_requires_the_names_that_it_is_given() -> None:
    assert object_schema("a", a={"const": 1}) == {"properties": {"a": {"const": 1}}, "required": ["a"]}
    assert object_schema(b={"type": "null"}) == {"properties": {"b": {"type": "null"}}}
