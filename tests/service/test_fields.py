import re
import sys

from service.fields import NOT_BLANK, case


def test_the_pattern_of_texts_is_what_is_not_blank() -> None:
    matched = {code for code in range(sys.maxunicode + 1) if re.search(NOT_BLANK, chr(code))}
    assert matched == {code for code in range(sys.maxunicode + 1) if chr(code).strip()}


def test_a_case_requires_what_it_names() -> None:
    assert case("a", a={"const": 1}) == {"properties": {"a": {"const": 1}}, "required": ["a"]}
    assert case(b={"type": "null"}) == {"properties": {"b": {"type": "null"}}}
