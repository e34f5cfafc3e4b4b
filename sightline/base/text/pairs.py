"""Formatting of a query and a document as one text, for rerankers that are language models."""

import re

from sightline.base.bundle import PairTemplate
from sightline.base.text.prompt import merge_parts
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
    merged, num_after = list(merge_parts(parts, tokenizer)), len(list(merge_parts(parts[document_end:], tokenizer)))
    before, after = merged[: len(merged) - num_after], merged[len(merged) - num_after :]
    *fixed, last = before if before and isinstance(before[-1], str) else [*before, ""]  # which ends with the document

    def ids_of(parts: list[str | int], *, is_start: bool) -> list[int]:
        ids: list[int] = []
        for index, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
            elif max_tokens is None:
                ids += tokenizer.encode(part, add_special_tokens=False, is_start=is_start and index == 0)
            else:  # tokens beyond the limit are not needed to see that there are too many
                ids += tokenizer.first_ids(part, max_tokens, is_start=is_start and index == 0)
        return ids

    fixed_ids, after_ids = ids_of(fixed, is_start=True), ids_of(after, is_start=False)
    last_ids = ids_of([last] if last else [], is_start=not fixed)
    if max_tokens is not None:
        budget = max_tokens - len(fixed_ids) - len(after_ids)
        if budget < 1:
            raise ValueError(f"max_tokens must be greater than the {max_tokens - budget} tokens around the document")
        last_ids = last_ids[:budget]
    return [*fixed_ids, *last_ids, *after_ids]
