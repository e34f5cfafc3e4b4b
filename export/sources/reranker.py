"""Rerankers that answer yes or no: the answers, and the text around a query and a document.

A folder of sentence-transformers names the answers in its module LogitScore and has a chat template
with the roles query and document. The first repositories of Qwen3-Reranker have neither: they are
folders of a language model, and their README has the text.
"""

from dataclasses import dataclass

from tokenizers import Tokenizer

from sightline.base.bundle import PairTemplate
from sightline.base.text.prompt import ChatTemplateError
from sightline.export.import_errors import ImportFailedError
from sightline.export.sources.chat_template import read_pair_template
from sightline.export.sources.opened_checkpoint import Folder
from sightline.export.sources.sentence_transformers import SentenceOptions, read_tokenizer_limit
from sightline.export.tokenizers import special_ids

PUBLISHED_FAMILY = "qwen3"
# The format of the README of Qwen3-Reranker (Zhang et al. 2025, section 2).
PUBLISHED = PairTemplate(
    text="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    instruction="Given a web search query, retrieve relevant passages that answer the query",
)
PUBLISHED_SPECIAL = ("<|im_start|>", "<|im_end|>")
NOTE = (
    "imported as Qwen3-Reranker: a score compares the answers yes and no to the prompt of its README; other models of "
    "this architecture answer that prompt without having been trained for it"
)


@dataclass(frozen=True)
class Reranker:
    """Computation of a score by a language model."""

    # Token ids of yes and no. A class with a layer for the score has none. None in place of the
    # second: the score is the logit of the first.
    answers: tuple[int, int | None] | None
    template: PairTemplate | None  # None: the tokenizer formats pairs of texts
    max_tokens: int | None
    note: str = ""


def read_reranker(
    folder: Folder, family: str, sentences: SentenceOptions | None, tokenizer: Tokenizer, task: str | None
) -> Reranker | None:
    """Read the options of a reranker; return None if the folder is none.

    `sentences` is None for a folder that sentence-transformers did not save.
    """
    special = special_ids(tokenizer)
    if sentences is not None and sentences.is_cross_encoder:
        try:
            template = read_pair_template(folder, sentences.instruction, special) if sentences.has_template else None
        except ChatTemplateError as error:
            raise ImportFailedError(
                f"{folder.path} is a reranker whose chat template must have messages of the roles query and document: "
                f"{error}"
            ) from None
        return Reranker(sentences.answers, template, sentences.max_tokens)
    is_generator = any(name.endswith("ForCausalLM") for name in folder.architectures)
    if sentences is not None or task != "rerank" or not is_generator:
        return None
    if family != PUBLISHED_FAMILY:
        raise ImportFailedError(
            f"the task rerank needs to know the text around a query and a document; for a model of the family "
            f"{family} that generates text it is known only from modules.json with the module LogitScore of "
            "sentence-transformers"
        )
    for name in PUBLISHED_SPECIAL:
        if name not in special:
            raise ImportFailedError(f"the tokenizer has no special token {name}, which Qwen3-Reranker needs")
    yes, no = (tokenizer.token_to_id(name) for name in ("yes", "no"))
    if yes is None or no is None:
        raise ImportFailedError(
            "the tokenizer needs the tokens 'yes' and 'no', which are the answers of Qwen3-Reranker"
        )
    return Reranker((yes, no), PUBLISHED, read_tokenizer_limit(folder.json), NOTE)
