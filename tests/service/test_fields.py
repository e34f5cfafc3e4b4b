import re
import sys

from sightline.service.body_fields import NOT_BLANK


def test_the_pattern_of_texts_matches_texts_that_are_not_blank() -> None:
    matched = {code for code in range(sys.maxunicode + 1) if re.search(NOT_BLANK, chr(code))}
    assert matched == {code for code in range(sys.maxunicode + 1) if chr(code).strip()}
