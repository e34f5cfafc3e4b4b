"""The Transformer equals its formulas and `torch.nn.Transformer`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sightline.model.architectures.transformer import Transformer
from sightline.model.config import Decoder, EncoderAttention, TransformerConfig
from sightline.model.layers.multi_head_attention import MultiHeadAttention, causal_mask, length_mask
from sightline.model.layers.positions import sinusoidal_positions
from sightline.model.layers.transformer_layer import DecoderLayer, EncoderLayer

PARTS = ("query", "key", "value", "output")


def copy_attention(theirs: nn.MultiheadAttention, ours: MultiHeadAttention) -> None:
    theirs.in_proj_weight.copy_(torch.cat([ours.query.weight, ours.key.weight, ours.value.weight]))
    theirs.in_proj_bias.copy_(torch.cat([ours.query.bias, ours.key.bias, ours.value.bias]))
    theirs.out_proj.load_state_dict(ours.output.state_dict())


def copy_layer(theirs: nn.Module, ours: EncoderLayer | DecoderLayer) -> None:
    norms = [ours.self_attention_norm.norm, ours.feed_forward_norm.norm]
    assert isinstance(ours.self_attention, MultiHeadAttention)
    copy_attention(theirs.get_submodule("self_attn"), ours.self_attention)  # type: ignore[arg-type]
    if isinstance(ours, DecoderLayer):
        copy_attention(theirs.get_submodule("multihead_attn"), ours.cross_attention)  # type: ignore[arg-type]
        norms.insert(1, ours.cross_attention_norm.norm)
    theirs.get_submodule("linear1").load_state_dict(ours.feed_forward.inner.state_dict())
    theirs.get_submodule("linear2").load_state_dict(ours.feed_forward.outer.state_dict())
    for number, norm in enumerate(norms, start=1):
        theirs.get_submodule(f"norm{number}").load_state_dict(norm.state_dict())


def pytorch_twin(model: Transformer) -> nn.Transformer:
    config = model.config
    twin = nn.Transformer(
        config.d_model,
        config.num_heads,
        config.encoder_layers,
        config.decoder_layers,
        config.d_ff,
        dropout=0.0,
        batch_first=True,
        norm_first=config.pre_norm,
    )
    with torch.no_grad():
        for stack, norm in ((twin.encoder, model.encoder_norm), (twin.decoder, model.decoder_norm)):
            if config.pre_norm:
                stack.get_submodule("norm").load_state_dict(norm.state_dict())
            else:
                # PyTorch has one more normalization after each stack of post-norm layers.
                stack.norm = None
        for theirs, ours in zip(
            [*twin.encoder.layers, *twin.decoder.layers], [*model.encoder, *model.decoder], strict=True
        ):
            assert isinstance(ours, EncoderLayer | DecoderLayer)
            copy_layer(theirs, ours)
    return twin


def shake(model: nn.Module) -> None:
    # Initial biases of 0 and norm weights of 1 would hide a missing parameter.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # of a shortcut that pre-norm stacks lack
@pytest.mark.parametrize("lengths", [[6, 6, 6], [6, 2, 4]], ids=["full", "padded"])
@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("change", [{}, {"pre_norm": True}], ids=["post-norm", "pre-norm"])
def test_the_stack_equals_pytorchs_transformer_with_copied_weights(
    toy_config: Callable[[int], TransformerConfig], change: dict[str, Any], lengths: list[int], need_weights: bool
) -> None:
    torch.manual_seed(0)
    toy_model = Transformer(replace(toy_config(40), **change)).eval()
    shake(toy_model)
    twin = pytorch_twin(toy_model)  # in training mode without dropout: evaluation mode has a fused path of its own
    source, target, source_lengths = torch.randint(3, 40, (3, 6)), torch.randint(3, 40, (3, 5)), torch.tensor(lengths)
    memory, _ = toy_model.encode(source, source_lengths, need_weights)
    decoded, _, _ = toy_model.decode(target, memory, source_lengths, need_weights)
    padding = ~length_mask(source_lengths, 6)  # (B, S), True where padded
    expected = twin(
        toy_model.embed(source),
        toy_model.embed(target),
        tgt_mask=~causal_mask(5),
        src_key_padding_mask=padding,
        memory_key_padding_mask=padding,
    )
    torch.testing.assert_close(decoded, expected, atol=1e-5, rtol=1e-4)


def test_padding_and_later_positions_change_nothing(toy_model: Transformer) -> None:
    source, target, lengths = torch.randint(3, 40, (1, 6)), torch.randint(3, 40, (1, 5)), torch.tensor([4])
    logits = toy_model(source, lengths, target)
    source[0, 4:], target[0, 3:] = 7, 8
    torch.testing.assert_close(toy_model(source, lengths, target)[:, :3], logits[:, :3])
    torch.testing.assert_close(toy_model(source[:, :4], lengths, target)[:, :3], logits[:, :3])


def test_maps_have_their_shapes_and_their_rows_sum_to_one(toy_model: Transformer) -> None:
    source, target, lengths = torch.randint(3, 40, (2, 6)), torch.randint(3, 40, (2, 5)), torch.tensor([6, 3])
    maps = toy_model.attention_maps(source, lengths, target)
    for weights, shape in (
        (maps["encoder"], (2, 2, 2, 6, 6)),
        (maps["decoder"], (2, 2, 2, 5, 5)),
        (maps["cross"], (2, 2, 2, 5, 6)),
    ):
        assert weights.shape == shape
        torch.testing.assert_close(weights.sum(-1), torch.ones(shape[:-1]))
    assert (maps["encoder"][:, 1, ..., 3:] == 0).all()
    assert (maps["cross"][:, 1, ..., 3:] == 0).all()
    assert (maps["decoder"].triu(diagonal=1) == 0).all()


@pytest.mark.parametrize("kind", ["single-head", "single-head-without-weights"])
def test_a_single_head_encoder_does_not_change_the_decoders_heads(
    toy_config: Callable[[int], TransformerConfig], kind: EncoderAttention
) -> None:
    model = Transformer(replace(toy_config(40), encoder_attention=kind)).eval()
    source, target, lengths = torch.randint(3, 40, (2, 6)), torch.randint(3, 40, (2, 5)), torch.tensor([6, 3])
    maps = model.attention_maps(source, lengths, target)
    assert maps["encoder"].shape == (2, 2, 1, 6, 6)
    torch.testing.assert_close(maps["encoder"].sum(-1), torch.ones(2, 2, 1, 6))
    assert (maps["encoder"][:, 1, ..., 3:] == 0).all()
    assert maps["cross"].shape == (2, 2, 2, 5, 6)
    assert "encoder_slots" not in maps
    learnt = [name for name, _ in model.named_parameters() if name.startswith("encoder.0.self_attention.")]
    parts = PARTS if kind == "single-head" else ()
    assert learnt == [f"encoder.0.self_attention.{part}.{name}" for part in parts for name in ("weight", "bias")]


def test_a_causal_encoder_reads_no_later_tokens(toy_config: Callable[[int], TransformerConfig]) -> None:
    model = Transformer(replace(toy_config(40), causal_encoder=True)).eval()
    source, lengths = torch.randint(3, 40, (2, 6)), torch.tensor([6, 6])
    source[1, :4] = source[0, :4]
    hidden, maps = model.encode(source, lengths, need_weights=True)
    assert maps is not None
    torch.testing.assert_close(hidden[0, :4], hidden[1, :4])
    assert not torch.equal(hidden[0, 4:], hidden[1, 4:])
    assert (maps["encoder"].triu(diagonal=1) == 0).all()
    with pytest.raises(ValueError, match='causal_encoder needs encoder_attention "multi-head" or'):
        replace(model.config, encoder_attention="linformer")


def test_parameter_names_of_default_checkpoints_are_stable(toy_model: Transformer) -> None:
    linears = ["feed_forward.inner", "feed_forward.outer"]
    norms = ["self_attention_norm.norm", "feed_forward_norm.norm"]
    own, cross = ([f"{kind}.{part}" for part in PARTS] for kind in ("self_attention", "cross_attention"))
    layers = {
        "encoder": [*own, *linears, *norms],
        "decoder": [*own, *cross, *linears, *norms, "cross_attention_norm.norm"],
    }
    modules = [f"{stack}.{number}.{name}" for stack, names in layers.items() for number in range(2) for name in names]
    expected = {f"{module}.{kind}" for module in modules for kind in ("weight", "bias")}
    assert set(toy_model.state_dict()) == {"embedding.weight", *expected}


def test_embedding_is_scaled_and_has_positions_added(toy_model: Transformer) -> None:
    ids = torch.tensor([[5, 9]])
    expected = toy_model.embedding.weight[ids] * 4.0 + sinusoidal_positions(2, 16)
    torch.testing.assert_close(toy_model.embed(ids), expected)


def test_source_target_and_output_share_one_matrix(toy_model: Transformer) -> None:
    names = [name for name, parameter in toy_model.named_parameters() if 40 in parameter.shape]
    assert names == ["embedding.weight"]
    decoded = torch.randn(2, 16)
    torch.testing.assert_close(toy_model.logits(decoded), decoded @ toy_model.embedding.weight.T)


def test_more_tokens_than_positions_are_rejected_with_both_numbers(toy_model: Transformer) -> None:
    with pytest.raises(ValueError, match="input has 129 tokens, but max_positions is 128"):
        toy_model.embed(torch.zeros(1, 129, dtype=torch.long))


def test_the_default_sizes_are_the_papers_base_model() -> None:
    config = TransformerConfig(vocab_size=10)
    assert (config.encoder_layers, config.d_model, config.num_heads, config.d_ff) == (6, 512, 8, 2048)
    assert config.head_size == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3}, "multiple of num_heads"),
        ({"d_model": 7, "num_heads": 1}, "d_model must be even for sinusoidal positions, got 7"),
        ({"dropout": 1.0}, "dropout must be less than or equal to 0.9, got 1.0"),
        ({"encoder_layers": 0}, "encoder_layers must be greater than or equal to 1, got 0"),
    ],
)
def test_impossible_sizes_are_rejected(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransformerConfig(vocab_size=10, **change)


def test_dropout_applies_only_in_training_mode(
    toy_model: Transformer, toy_config: Callable[[int], TransformerConfig]
) -> None:
    def twice() -> tuple[Tensor, Tensor]:
        args = torch.tensor([[5, 6, 2]]), torch.tensor([3]), torch.tensor([[1, 7]])
        return toy_model(*args), toy_model(*args)

    first, second = twice()
    assert torch.equal(first, second)
    toy_model.train()
    first, second = twice()
    assert not torch.equal(first, second)


@pytest.mark.parametrize("decoder", ["transformer", "ssru"])
def test_the_weights_of_the_guided_head_are_those_of_its_layer(
    toy_config: Callable[[int], TransformerConfig], decoder: Decoder
) -> None:
    model = Transformer(replace(toy_config(40), decoder=decoder, decoder_layers=3)).eval()
    source, target, lengths = torch.randint(3, 40, (2, 6)), torch.randint(3, 40, (2, 5)), torch.tensor([6, 3])
    maps = model.attention_maps(source, lengths, target)
    assert ("decoder" in maps) == (decoder == "transformer")
    memory, _ = model.encode(source, lengths)
    decoded, weights = model.decode_guided(target, memory, lengths)
    torch.testing.assert_close(weights, maps["cross"][1, :, 0])  # of the layer before the last
    torch.testing.assert_close(decoded, model.decode(target, memory, lengths)[0])
