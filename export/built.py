"""Interface between the families of architectures and the import of checkpoints."""

from dataclasses import dataclass
from typing import Literal

import onnx
from tokenizers import Tokenizer

from service.bundle import (
    Attention,
    ChatTemplate,
    Embedding,
    GenerationDefaults,
    Languages,
    Limits,
    State,
    Tokens,
)


@dataclass(frozen=True)
class Built:
    """Graphs of an imported model, whose weights are in a weight file, and their description."""

    family: str  # entry of the table of families, such as "bert"
    architecture: str  # informative, such as "BertModel"
    parameters: int
    encoder: onnx.ModelProto | None  # None for decoder-only models
    decoder: onnx.ModelProto | None  # None for models that generate no text
    states: tuple[State, ...]
    attention: tuple[Attention, ...]
    tokens: Tokens
    limits: Limits
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer | None = None  # None: the same as for sources
    similar: onnx.ModelProto | None = None
    decoder_start: Literal["start_token", "source"] = "start_token"
    labels: tuple[str, ...] = ()
    label_kind: Literal["classes", "independent", "score", "tokens"] = "classes"
    languages: Languages | None = None
    chat: ChatTemplate | None = None
    generation: GenerationDefaults | None = None  # None: from generation_config.json
    embedding: Embedding | None = None
    description: str = ""  # used if the user gives none
    # Layer and head of the cross-attention that was trained to align words; None if there is none.
    guided_alignment: tuple[int, int] | None = None
