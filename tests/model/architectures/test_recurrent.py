"""Recurrent decoders follow the equations of the papers step by step, alone and in a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sightline.model.architectures.recurrent import RecurrentModel
from sightline.model.config import RecurrentConfig
from sightline.model.layers.recurrent_attention import align
from tests.support.tables import read_table

VOCABULARY = 20
SYSTEMS: dict[str, dict[str, Any]] = {
    "fixed context": {"attention": "none"},
    "fixed context, LSTM": {"attention": "none", "cell": "lstm", "bidirectional": False},
    "Bahdanau": {"attention": "additive"},
    "Bahdanau, LSTM": {"attention": "additive", "cell": "lstm"},
    "reduced rank": {"attention": "reduced_rank", "attention_size": 2},
    "Luong general": {"attention": "general", "query": "current", "input_feeding": True},
    "Luong dot": {"attention": "dot", "query": "current"},
    "Luong concat": {"attention": "concat", "query": "current", "input_feeding": True},
    "Luong location": {"attention": "location", "query": "current"},
    "local-m": {"attention": "general", "query": "current", "window": "local-m", "window_radius": 1},
    "local-p": {"attention": "general", "query": "current", "window": "local-p", "window_radius": 2},
    "hard": {"attention": "general", "query": "current", "selection": "reinforce"},
}
SOURCES, TARGETS = [[5, 9, 11, 2], [7, 2], [3, 4, 5, 6, 8, 2]], [[1, 4, 6, 9], [1, 12, 3, 3], [1, 8, 8, 7]]


def made(**settings: Any) -> RecurrentModel:
    torch.manual_seed(1)
    sizes = {"embedding_size": 6, "encoder_size": 4, "decoder_size": 8, "max_positions": 10}
    model = RecurrentModel(RecurrentConfig(VOCABULARY, **{**sizes, **settings}))
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.2)  # zeros would hide a bias that is left out
    return model.eval()


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(row) for row in rows])
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True), lengths


def decoded(model: RecurrentModel, sources: list[list[int]], targets: list[list[int]]) -> tuple[Tensor, Tensor | None]:
    source, lengths = padded(sources)
    memory, _ = model.encode(source, lengths)
    features, _, maps = model.decode(torch.tensor(targets), memory, lengths, need_weights=True)
    return model.logits(features), maps


@pytest.mark.parametrize("name", SYSTEMS)
@torch.no_grad()
def test_a_row_does_not_depend_on_its_batch(name: str) -> None:
    model = made(**SYSTEMS[name])
    batched, maps = decoded(model, SOURCES, TARGETS)
    for row, (source, target) in enumerate(zip(SOURCES, TARGETS, strict=True)):
        alone, own_maps = decoded(model, [source], [target])
        torch.testing.assert_close(batched[row], alone[0], atol=1e-5, rtol=0)
        if maps is not None and own_maps is not None:
            torch.testing.assert_close(maps[:, row, :, :, : len(source)], own_maps[:, 0], atol=1e-5, rtol=0)
            assert not maps[:, row, :, :, len(source) :].any()


@pytest.mark.parametrize("name", SYSTEMS)
@torch.no_grad()
def test_later_tokens_do_not_change_earlier_ones(name: str) -> None:
    model = made(**SYSTEMS[name])
    whole, _ = decoded(model, SOURCES, TARGETS)
    changed, _ = decoded(model, SOURCES, [[*target[:2], 15, 16] for target in TARGETS])
    torch.testing.assert_close(whole[:, :2], changed[:, :2])
    assert not torch.equal(whole[:, 2:], changed[:, 2:])


@pytest.mark.parametrize("name", sorted(set(SYSTEMS) - {"fixed context", "fixed context, LSTM"}))
@torch.no_grad()
def test_weights_sum_to_one_except_with_a_gaussian(name: str) -> None:
    _, maps = decoded(made(**SYSTEMS[name]), SOURCES, TARGETS)
    assert maps is not None
    assert maps.shape == (1, 3, 1, 4, 6)
    sums = maps.sum(-1)
    if name == "local-p":
        assert (sums < 1).all()
    else:
        torch.testing.assert_close(sums, torch.ones_like(sums))


@torch.no_grad()
def test_hard_attention_selects_only_the_likeliest_position() -> None:
    soft = made(**{**SYSTEMS["hard"], "selection": "soft"})
    hard = made(**SYSTEMS["hard"])
    hard.load_state_dict(soft.state_dict(), strict=False)
    (_, soft_maps), (_, hard_maps) = decoded(soft, SOURCES, TARGETS), decoded(hard, SOURCES, TARGETS)
    assert soft_maps is not None
    assert hard_maps is not None
    # Without input feeding, states do not depend on the selected position, so both have the same
    # weights.
    assert torch.equal(hard_maps.argmax(-1), soft_maps.argmax(-1))
    assert torch.equal(hard_maps.sort(-1, descending=True).values[..., 0], torch.ones(1, 3, 1, 4))
    assert torch.equal(hard_maps.sum(-1), torch.ones(1, 3, 1, 4))


def gru(model: RecurrentModel, x: Tensor, h: Tensor) -> Tensor:
    """Compute one GRU step of Cho et al. 2014, with the reset gate as in PyTorch."""
    cell = model.cell
    assert isinstance(cell, torch.nn.GRUCell)
    ri, zi, ni = (cell.weight_ih @ x + cell.bias_ih).chunk(3)
    rh, zh, nh = (cell.weight_hh @ h + cell.bias_hh).chunk(3)
    r, z = torch.sigmoid(ri + rh), torch.sigmoid(zi + zh)
    return (1 - z) * torch.tanh(ni + r * nh) + z * h


@torch.no_grad()
def test_a_step_of_bahdanau_equals_the_papers_equations() -> None:
    """Section 3.1 and A.2.2: alignment with the previous state, then the state, then maxout."""
    model = made(attention="additive")
    assert model.score is not None
    source, lengths = padded(SOURCES[:1])
    memory, _ = model.encode(source, lengths)
    hs, s = memory.annotations[0], memory.state[0]
    backward_first = hs[0, 4:]  # the backward direction's state at the first token
    torch.testing.assert_close(s, torch.tanh(model.bridge.weight @ backward_first + model.bridge.bias))
    logits, _ = decoded(model, SOURCES[:1], TARGETS[:1])
    for i, y in enumerate(TARGETS[0]):
        embedded = model.embedding.weight[y] * 6**0.5
        e = model.score(s[None], memory.keys)[0]
        c = e.softmax(0) @ hs  # equations 5 and 6
        s = gru(model, torch.cat((embedded, c)), s)
        pairs = model.readout.inner(torch.cat((s, embedded, c)))
        t = torch.stack([torch.maximum(pairs[2 * j], pairs[2 * j + 1]) for j in range(6)])
        torch.testing.assert_close(logits[0, i], model.embedding.weight @ t)


@pytest.mark.parametrize("name", ["Luong general", "Luong dot", "local-m", "local-p"])
@torch.no_grad()
def test_a_step_of_luong_equals_the_papers_equations(name: str) -> None:
    """Section 3: the state first, then the alignment with it, equation 5, and input feeding."""
    model = made(**SYSTEMS[name])
    assert model.score is not None
    source, lengths = padded(SOURCES[:1])
    memory, _ = model.encode(source, lengths)
    logits, _ = decoded(model, SOURCES[:1], TARGETS[:1])
    h, feed = memory.state[0], torch.zeros(6)
    for t, y in enumerate(TARGETS[0]):
        embedded = model.embedding.weight[y] * 6**0.5
        h = gru(model, torch.cat((embedded, feed)) if model.config.input_feeding else embedded, h)
        scores = model.score(h[None], memory.keys)
        centre = torch.tensor([float(min(t, len(SOURCES[0]) - 1))]) if name == "local-m" else None
        if model.position is not None:
            centre = model.position(h[None], lengths)
        a = align(scores, lengths, centre, model.config.window_radius, is_gaussian=name == "local-p")[0]
        c = a @ memory.annotations[0]
        feed = torch.tanh(model.readout.inner.weight @ torch.cat((c, h)))
        torch.testing.assert_close(logits[0, t], model.embedding.weight @ feed * 6**0.25)


@torch.no_grad()
def test_a_fixed_context_is_the_encoders_last_states_at_every_step() -> None:
    """Cho et al. 2014, section 2.2; Bahdanau et al. 2015, section 2.1, equations 1 to 3."""
    model = made(attention="none")
    source, lengths = padded(SOURCES)
    memory, _ = model.encode(source, lengths)
    for row, length in enumerate(lengths.tolist()):
        forward_last, backward_last = memory.annotations[row, length - 1, :4], memory.annotations[row, 0, 4:]
        torch.testing.assert_close(memory.context[row], torch.cat((forward_last, backward_last)))
    logits, maps = decoded(model, SOURCES, TARGETS)
    assert maps is None
    for row, target in enumerate(TARGETS):
        c, s = memory.context[row], memory.state[row]
        for i, y in enumerate(target):
            embedded = model.embedding.weight[y] * 6**0.5
            s = gru(model, torch.cat((embedded, c)), s)
            pairs = model.readout.inner(torch.cat((s, embedded, c)))
            torch.testing.assert_close(logits[row, i], model.embedding.weight @ pairs.view(6, 2).amax(1))


@pytest.mark.parametrize("name", ["Bahdanau", "reduced rank", "Luong general", "Luong concat", "local-p"])
@torch.no_grad()
def test_annotations_are_projected_once_for_all_steps(name: str) -> None:
    model = made(**SYSTEMS[name])
    assert model.score is not None and model.score.annotation is not None
    calls: list[int] = []
    model.score.annotation.register_forward_hook(lambda *_: calls.append(1))
    decoded(model, SOURCES, TARGETS)
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    read_table(__file__),
)
def test_settings_that_contradict_each_other_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**settings)


def test_too_long_a_source_is_rejected() -> None:
    source, lengths = padded([[3] * 11])
    with pytest.raises(ValueError, match="11 tokens, but max_positions is"):
        made().encode(source, lengths)
