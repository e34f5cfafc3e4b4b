"""Interface between the families of architectures and the import of checkpoints."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from export.graphs.model import Graphs
from service.bundle import ChatTemplate, Embedding, GenerationDefaults, Languages, Limits, Tokens


@dataclass(frozen=True)
class Built:
    """Graphs of an imported model, and the rest of its manifest."""

    family: str  # entry of the table of families, such as "bert"
    architecture: str  # informative, such as "BertModel"
    parameters: int
    graphs: Graphs
    tokens: Tokens
    limits: Limits
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer | None = None  # None: the same as for sources
    languages: Languages | None = None
    chat: ChatTemplate | None = None
    generation: GenerationDefaults | None = None  # None: from generation_config.json
    embedding: Embedding | None = None
    dense: tuple[NDArray[np.float32], ...] = ()  # content of the file of each layer of `embedding`
    description: str = ""  # used if the user gives none
    # Layer and head of the cross-attention that was trained to align words; None if there is none.
    guided_alignment: tuple[int, int] | None = None
