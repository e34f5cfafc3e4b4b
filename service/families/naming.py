"""Refusals of the service's own bodies, told in a family's words."""

import contextlib
import re
from collections.abc import Iterator, Mapping

from service.errors import ApiError
from service.fields import Texts

PARAM = re.compile(r"(?:parameters\.)?(\w+)(\[\d+\]|)(.*)")
FIELD = re.compile(r"[a-z]+(?:_[a-z]+)+")  # in a message: a word with an underscore is a field, no English


@contextlib.contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Name a family's own field in every refusal of what stands in the block.

    Args:
        names: the family's field for a field of the service's own body, `parameters.` left out, or for one element
            of it, as `inputs[3]`. What is not in it has the same name in both.
    """
    try:
        yield
    except ApiError as error:
        message = FIELD.sub(lambda found: names.get(found[0], found[0]), error.message)
        raise ApiError(error.code, message, param=error.param and _renamed(error.param, names)) from None


def _renamed(param: str, names: Mapping[str, str]) -> str:
    found = PARAM.fullmatch(param)
    if found is None:  # a header's
        return param
    field, place, rest = found.groups()
    return (names.get(field + place) or names.get(field, field) + place) + rest


def names_of_copies(field: str, texts: Texts, num_copies: int) -> dict[str, str]:
    """Names for `naming` where each text stands `num_copies` times, one behind the other, in a list `field`."""
    return {f"{field}[{place}]": texts.param(place // num_copies) for place in range(num_copies * len(texts.texts))}
