"""Token types of text pairs, from the post-processor of tokenizer.json.

The graph sees token ids only. It gives type 0 to all tokens up to the first separator, and type 1
to those after it. A tokenizer must do the same, or use type 0 for all tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sightline.export.import_errors import ImportFailedError


class PairsUnsupportedError(ImportFailedError):
    """A model cannot read pairs of texts, but single texts."""


_UNSUPPORTED = (
    "tokenizer.json: the token types of text pairs are not supported; type 0 must end with the first separator, such "
    "as [SEP], or be the type of all tokens"
)


def type_separator(tokenizer: Mapping[str, Any] | None, input_names: Sequence[str] | None = None) -> int | None:
    """Return the id of the token that ends type 0, or None if all tokens have type 0.

    `input_names` is None for the inputs of the tokenizer's class, which include token types. Raises
    `PairsUnsupportedError` if pairs follow another rule or there is no post-processor, and
    `ImportFailedError` if a single text has other types than 0.
    """
    if input_names is not None and "token_type_ids" not in input_names:
        return None
    processors = _processors((tokenizer or {}).get("post_processor"))
    for processor in processors:
        match processor:
            case {"type": "BertProcessing", "sep": [str(), int(separator)]}:
                return separator
            case {"type": "RobertaProcessing"}:
                return None
            case {"type": "TemplateProcessing"}:
                return _separator_of_template(processor)
    raise PairsUnsupportedError(
        "tokenizer.json has no post_processor that adds separators; the model has token types, which need one; save "
        "the tokenizer again with transformers' AutoTokenizer and save_pretrained"
    )


def _processors(processor: Any) -> list[Mapping[str, Any]]:
    """Return a processor and those in it, if it is a sequence."""
    if not isinstance(processor, dict):
        return []
    inner = processor.get("processors", ()) if processor.get("type") == "Sequence" else ()
    return [processor, *(part for nested in inner for part in _processors(nested))]


def _separator_of_template(processor: Mapping[str, Any]) -> int | None:
    """Return the separator of a template of special tokens and texts."""
    try:
        templates = [[_piece(piece) for piece in processor[kind]] for kind in ("single", "pair")]
        ids = {name: list(token["ids"]) for name, token in processor["special_tokens"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ImportFailedError("tokenizer.json: the post_processor is not a valid template") from None
    if all(type_id == 0 for template in templates for _, type_id in template):
        return None
    for name, token_ids in ids.items():
        if len(token_ids) == 1 and all(_follows_rule(template, name) for template in templates):
            return int(token_ids[0])
    is_single = all(type_id == 0 for _, type_id in templates[0])
    raise (PairsUnsupportedError if is_single else ImportFailedError)(_UNSUPPORTED)


def _piece(piece: Mapping[str, Any]) -> tuple[str | None, int]:
    """Return the name of a special token, None for a text, and the token type."""
    ((kind, content),) = piece.items()
    return content["id"] if kind == "SpecialToken" else None, int(content["type_id"])


def _follows_rule(template: Sequence[tuple[str | None, int]], separator: str) -> bool:
    """Return True if exactly the pieces after the first separator have type 1."""
    names = [name for name, _ in template]
    if separator not in names:
        return False
    last = names.index(separator)
    return all(type_id == int(index > last) for index, (_, type_id) in enumerate(template))
