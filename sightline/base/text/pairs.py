"""Formatting of a query and a document as one text, for rerankers that are language models."""

import re

from sightline.base.bundle import PairTemplate
from sightline.base.text.prompt import Prompt, merge_parts
from sightline.base.text.tokenizer import TextTokenizer

_SLOT = re.compile(r"\{(instruction|query|document)\}")


def tokenize_with_template(
    tokenizer: TextTokenizer,
    template: PairTemplate,
    query: str,
    document: str,
    max_tokens: int | None = None,
    instruction: str | None = None,
) -> list[int]:
    """Return at most `max_tokens` ids of a query and a document, whose end is cut if necessary.

    Special tokens in the template are recognized by their names. The query, the document and the
    instruction (that of the template if None) are plain text. Raises `ValueError` if the texts
    before the document leave no token for it.
    """
    values = {"query": query, "document": document}
    values["instruction"] = template.instruction if instruction is None else instruction
    parts: list[str | int] = []
    document_end = 0
    for index, piece in enumerate(_SLOT.split(template.text)):
        parts += [values[piece]] if index % 2 else tokenizer.split_special(piece)
        if index % 2 and piece == "document":
            document_end = len(parts)
    merged, after = (tuple(merge_parts(some, tokenizer)) for some in (parts, parts[document_end:]))
    before = merged[: len(merged) - len(after)]  # its last text ends with the document
    ids, ids_after = (Prompt(some).encode(tokenizer, max_tokens) for some in (before, after))
    if max_tokens is not None:
        num_around = len(Prompt(before[:-1]).encode(tokenizer, max_tokens)) + len(ids_after)
        if num_around >= max_tokens:
            raise ValueError(f"max_tokens must be greater than the {num_around} tokens around the document")
        ids = ids[: max_tokens - len(ids_after)]
    return [*ids, *ids_after]
