"""Token types of text pairs, as the tokenizer gives them.

The graph sees token ids only. It gives type 0 to all tokens up to the first separator, and type 1
to those after it. A tokenizer must do the same, or use type 0 for all tokens.
"""

from collections.abc import Sequence

from tokenizers import Encoding, Tokenizer

from sightline.export.import_errors import ImportFailedError

TEXT = "a"


class PairsUnsupportedError(ImportFailedError):
    """A model cannot read pairs of texts, but single texts."""


_UNSUPPORTED = (
    "tokenizer.json: the token types of text pairs are not supported; type 0 must end with the first separator, such "
    "as [SEP] that the post_processor adds, or be the type of all tokens"
)


def type_separator(tokenizer: Tokenizer | None, input_names: Sequence[str] | None = None) -> int | None:
    """Return the id of the token that ends type 0, or None if all tokens have type 0.

    `input_names` is None for the inputs of the tokenizer's class, which include token types. Raises
    `PairsUnsupportedError` if pairs follow another rule or get no separators, and
    `ImportFailedError` if a single text has other types than 0.
    """
    if input_names is not None and "token_type_ids" not in input_names:
        return None
    if tokenizer is None:
        raise PairsUnsupportedError(_UNSUPPORTED)
    try:
        single, pair = tokenizer.encode(TEXT), tokenizer.encode(TEXT, TEXT)
    except Exception as error:  # the library raises bare exceptions
        raise ImportFailedError(f"the tokenizer fails for the text {TEXT!r}: {error}") from None
    if not any([*single.type_ids, *pair.type_ids]):
        return None
    for token, is_added in zip(pair.ids, pair.special_tokens_mask, strict=True):
        if is_added and _follows_rule(single, token) and _follows_rule(pair, token):
            return int(token)
    raise (ImportFailedError if any(single.type_ids) else PairsUnsupportedError)(_UNSUPPORTED)


def _follows_rule(encoding: Encoding, separator: int) -> bool:
    """Return True if exactly the tokens after the first separator have type 1."""
    if separator not in encoding.ids:
        return False
    last = encoding.ids.index(separator)
    return list(encoding.type_ids) == [int(index > last) for index in range(len(encoding.ids))]
