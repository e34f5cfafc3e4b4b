"""Jina embeddings of version 2 (Günther et al. 2023): BERT with ALiBi and gated layers.

`model_type` is that of BERT. The Python code of the repositories is never run.
"""

from collections.abc import Mapping
from dataclasses import replace

from sightline.export.families import Family
from sightline.export.families.description import Description, TokenEmbedding
from sightline.export.families.encoders import describe_encoder, embedding_modules, layer_modules, prefix_of
from sightline.export.families.weights import AdaptedModule, Source
from sightline.export.sources.opened_checkpoint import Config, Tensors
from sightline.model.config import alibi_slopes


def _slopes(heads: int) -> tuple[float, ...]:
    """Return the slope of each head (Press et al. 2022, section 3).

    Slopes of a power of two of heads are a geometric sequence that ends at 2 ** -8. Further heads
    have every second slope of twice as many heads.
    """
    power = 1 << (heads.bit_length() - 1)
    return alibi_slopes(power) + alibi_slopes(2 * power)[::2][: heads - power]


def _jina(config: Config, tensors: Tensors) -> Description:
    types = config.integer("type_vocab_size", 2)
    config.neutral("feed_forward_type", "geglu")
    config.ignore("emb_pooler", "attn_implementation", "model_max_length")
    model = describe_encoder(config, "jina_bert", TokenEmbedding(types=types, has_norm=True), positions="alibi")
    stack = model.encoder_stack
    feed_forward = replace(stack.feed_forward, gated=True, has_bias=False, has_output_bias=True)
    return replace(model, encoder=replace(stack, feed_forward=feed_forward, slopes=_slopes(stack.attention[0].heads)))


def _jina_modules(model: Description, tensors: Tensors) -> Mapping[str, Source]:
    prefix = prefix_of(tensors, "bert.")
    layer = f"{prefix}encoder.layer.{{}}"
    return (
        embedding_modules(f"{prefix}embeddings")
        | layer_modules(layer)
        | {
            "encoder.{}.feed_forward.gate": AdaptedModule(f"{layer}.mlp.gated_layers", index=0, count=2),
            "encoder.{}.feed_forward.inner": AdaptedModule(f"{layer}.mlp.gated_layers", index=1, count=2),
            "encoder.{}.feed_forward.outer": f"{layer}.mlp.wo",
            "encoder.{}.feed_forward_norm": f"{layer}.mlp.layernorm",
        }
    )


JINA_BERT = Family(
    "jina_bert",
    ("JinaBertModel", "JinaBertForMaskedLM"),
    _jina,
    _jina_modules,
    ("*embeddings.position_ids", "pooler.*", "bert.pooler.*", "cls.*"),
)
FAMILIES = (JINA_BERT,)
