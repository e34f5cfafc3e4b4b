import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sightline.model.architectures.transformer import Transformer
from tests.support.reference_decoding import (
    LogitsProcessors,
    NextLogits,
    ReferenceHypothesis,
    beam,
    greedy,
    log_softmax,
    pytorch_steps,
)

START, END = 0, 1


def random_steps(vocab_size: int, seed: int) -> NextLogits:
    """Language model with random distributions that depend on the seed and the prefix."""

    def next_logits(prefixes: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        assert len({len(prefix) for prefix in prefixes}) == 1
        logits = np.array([np.random.default_rng([seed, *prefix]).normal(size=vocab_size) * 2 for prefix in prefixes])
        return logits.astype(np.float32)

    return next_logits


def table_steps(table: dict[tuple[int, ...], list[float]]) -> NextLogits:
    """Model with given probabilities of four tokens per prefix; other prefixes end at once."""

    def next_logits(prefixes: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        rows = [table.get(tuple(prefix[1:]), [0.0, 1.0, 0.0, 0.0]) for prefix in prefixes]
        with np.errstate(divide="ignore"):
            return np.log(np.array(rows, dtype=np.float32))

    return next_logits


def shifted_steps(step: NextLogits, prefix: tuple[int, ...]) -> NextLogits:
    """Return a model that has read the prefix before it starts."""

    def next_logits(prefixes: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return step([[read[0], *prefix, *read[1:]] for read in prefixes])

    return next_logits


def every_hypothesis(step: NextLogits, vocab_size: int, max_new_tokens: int) -> list[ReferenceHypothesis]:
    """Enumerate all sequences that end with the end token or have the full length."""
    whole = []
    for length in range(1, max_new_tokens + 1):
        for ids in itertools.product(range(vocab_size), repeat=length):
            if END in ids[:-1] or (ids[-1] != END and length < max_new_tokens):
                continue
            rows = [log_softmax(step([[START, *ids[:i]]])[0]) for i in range(length)]
            log_probs = tuple(float(row[token]) for row, token in zip(rows, ids, strict=True))
            whole.append(ReferenceHypothesis(ids, log_probs, sum(log_probs)))
    return whole


def test_greedy_equals_an_argmax_loop_over_the_whole_model(toy_model: Transformer) -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        source = torch.randint(3, 40, (1, 3 + seed))
        ids: list[int] = []
        log_probs = []
        while len(ids) < 12 and (not ids or ids[-1] != 2):
            with torch.no_grad():
                logits = toy_model(source, torch.tensor([source.size(1)]), torch.tensor([[1, *ids]]))[0, -1]
            ids.append(int(logits.argmax()))
            log_probs.append(logits.log_softmax(-1).max().item())
        found = greedy(pytorch_steps(toy_model, source[0].tolist()), start_id=1, end_ids=2, max_new_tokens=12)
        assert found.ids == tuple(ids)
        assert found.log_probs == pytest.approx(log_probs, abs=1e-5)


def test_pytorch_steps_give_each_of_several_prefixes_its_own_distribution(toy_model: Transformer) -> None:
    step = pytorch_steps(toy_model, [5, 6, 2])
    batched = step([[1, 7, 8], [1, 9, 9], [1, 7, 7]])
    assert batched.shape == (3, 40)
    assert batched.dtype == np.float32
    np.testing.assert_allclose(batched[1], step([[1, 9, 9]])[0], atol=1e-5)


def test_greedy_stops_at_the_end_token_and_counts_it() -> None:
    step = table_steps({(): [0, 0.1, 0.6, 0.3], (2,): [0, 0.9, 0.1, 0]})
    found = greedy(step, START, END, max_new_tokens=5)
    assert found.ids == (2, END)
    assert found.score == pytest.approx(math.log(0.6) + math.log(0.9))


@pytest.mark.parametrize("max_new_tokens", [1, 3])
def test_greedy_stops_at_the_longest_length(max_new_tokens: int) -> None:
    step = table_steps({(2,) * n: [0, 0.1, 0.6, 0.3] for n in range(3)})
    assert greedy(step, START, END, max_new_tokens).ids == (2,) * max_new_tokens


@pytest.mark.parametrize("early_stopping", [False, True])
def test_one_beam_is_greedy(early_stopping: bool) -> None:
    """With one beam, only the bound lets the search continue past a finished hypothesis."""
    for seed in range(30):
        step = random_steps(6, seed)
        found = beam(step, START, END, 8, num_beams=1, length_penalty=0.0, early_stopping=early_stopping)
        assert found == [greedy(step, START, END, 8)]


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 1.0, 2.0])
def test_enough_beams_find_the_best_of_all_sequences(length_penalty: float) -> None:
    for seed in range(10):
        step = random_steps(4, seed)
        ranked = sorted(every_hypothesis(step, 4, 4), key=lambda h: -h.penalised_total(length_penalty))
        found = beam(step, START, END, 4, num_beams=256, length_penalty=length_penalty, num_return=5)
        assert [h.ids for h in found] == [h.ids for h in ranked[:5]]
        assert found[0].log_probs == pytest.approx(ranked[0].log_probs)


def test_an_end_token_beyond_the_first_num_beams_ranks_is_dropped() -> None:
    # Ranks: 2 (0.5), 3 (0.3), END (0.2). With two beams, END alone is third and never finishes.
    step = table_steps({(): [0, 0.2, 0.5, 0.3], (2,): [0, 0.9, 0.1, 0], (3,): [0, 0.9, 0.1, 0], (2, 2): [0, 1, 0, 0]})
    found = beam(step, START, END, 2, num_beams=2, num_return=2, length_penalty=0.0)
    assert [h.ids for h in found] == [(2, END), (3, END)]


def test_open_beams_are_finished_at_the_longest_length_and_compete() -> None:
    step = table_steps({(): [0, 0.45, 0.55, 0], (2,): [0, 0.05, 0.95, 0]})
    found = beam(step, START, END, 2, num_beams=2, num_return=2)
    assert [h.ids for h in found] == [(2, 2), (END,)]


def test_early_stopping_returns_the_first_finished_hypotheses_even_if_an_open_beam_is_better() -> None:
    # After two steps END (0.3) and 3 END (0.24) are finished; 2 2 (0.36) is open, and ends as the
    # best.
    table = {(): [0, 0.3, 0.4, 0.3], (2,): [0, 0.1, 0.9, 0], (3,): [0, 0.8, 0.2, 0], (2, 2): [0, 1.0, 0, 0]}
    step = table_steps(table)
    stopped = beam(step, START, END, 3, num_beams=2, num_return=2, length_penalty=0.0, early_stopping=True)
    went_on = beam(step, START, END, 3, num_beams=2, num_return=2, length_penalty=0.0, early_stopping=False)
    assert [h.ids for h in stopped] == [(END,), (3, END)]
    assert [h.ids for h in went_on] == [(2, 2, END), (END,)]


def test_the_bound_uses_the_current_length() -> None:
    """The heuristic bound ignores that a continuation could improve the mean of a beam."""
    table = {(): [0, 0.51, 0.49, 0.0], (2,): [0, 0, 1.0, 0], (2, 2): [0, 0, 1.0, 0]}
    step = table_steps(table)
    assert beam(step, START, END, 6, num_beams=1, early_stopping=False)[0].ids == (END,)
    assert greedy(step, START, END, 6).ids == (END,)
    # With two beams a second one must finish first, which takes long enough.
    assert beam(step, START, END, 6, num_beams=2, early_stopping=False)[0].ids == (2, 2, 2, END)


def test_early_stopping_never_continues_while_the_longest_continuation_could_win() -> None:
    """END scores -0.67 per token; 2 2 2 2 2 2 scores -0.71 / 6 at the largest length."""
    table = {(): [0, 0.51, 0.49, 0.0], **{(2,) * n: [0, 0, 1.0, 0] for n in range(1, 6)}}
    step = table_steps(table)
    assert beam(step, START, END, 6, num_beams=1, early_stopping=False)[0].ids == (END,)
    assert beam(step, START, END, 6, num_beams=1, early_stopping="never")[0].ids == (2,) * 6


def test_early_stopping_never_uses_the_current_length_if_length_is_not_rewarded() -> None:
    table = {(): [0, 0.51, 0.49, 0.0], **{(2,) * n: [0, 0, 1.0, 0] for n in range(1, 6)}}
    assert beam(table_steps(table), START, END, 6, 1, length_penalty=0.0, early_stopping="never")[0].ids == (END,)


@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_the_prefix_counts_neither_for_the_length_nor_for_the_score(length_penalty: float) -> None:
    """Decoding after a prefix is decoding with a model that starts where the prefix ends."""
    for seed in range(5):
        step = random_steps(5, seed)
        started = shifted_steps(step, (3, 2))
        assert greedy(step, START, END, 5, prefix=(3, 2)) == greedy(started, START, END, 5)
        assert beam(step, START, END, 5, 3, length_penalty, num_return=3, prefix=(3, 2)) == beam(
            started, START, END, 5, 3, length_penalty, num_return=3
        )


def test_greedy_penalises_logits_and_beams_log_probabilities() -> None:
    """The penalty divides positive logits and multiplies negative log-probabilities."""
    logits = np.array([[-9.0, 0.5, 0.6, 1.0]], np.float32)
    log_probs = log_softmax(logits[0])  # -10.8, -1.3, -1.2, -0.8

    def step(prefixes: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        return np.repeat(logits, len(prefixes), axis=0)

    penalty = LogitsProcessors(repetition_penalty=1.8)  # 1.0 to 0.56 and -0.8 to -1.45
    found = greedy(step, START, END, 1, prefix=[3], processors=penalty)
    assert found.ids == (2,)
    (best,) = beam(step, START, END, 1, num_beams=1, prefix=[3], processors=penalty)
    assert best.ids == (2,)
    mild = LogitsProcessors(repetition_penalty=1.6)  # 1.0 to 0.63 and -0.8 to -1.3
    assert greedy(step, START, END, 1, prefix=[3], processors=mild).ids == (3,)
    best, second, third = beam(step, START, END, 1, num_beams=3, num_return=3, prefix=[3], processors=mild)
    assert [best.ids, second.ids, third.ids] == [(2,), (3,), (END,)]
    assert second.score == pytest.approx(float(log_probs[3]))
    assert second.total == pytest.approx(1.6 * float(log_probs[3]))


@pytest.mark.parametrize("num_beams", [1, 3])
def test_processors_change_the_results_of_both_searches(num_beams: int) -> None:
    def search(step: NextLogits, **fields: Any) -> tuple[int, ...]:
        processors = LogitsProcessors(**fields)
        if num_beams == 1:
            return greedy(step, START, END, 9, processors=processors).ids
        return beam(step, START, END, 9, num_beams, processors=processors)[0].ids

    for seed in range(10):
        step = random_steps(5, seed)
        assert len(search(step, min_new_tokens=9)) == 9
        assert END not in search(step, min_new_tokens=9)[:8]
        assert not {2, 3} & set(search(step, suppress_tokens=(2, 3)))
        ids = search(step, no_repeat_ngram_size=2, min_new_tokens=5)
        assert len(set(itertools.pairwise(ids))) == len(ids) - 1


def test_a_stop_ends_a_hypothesis_as_the_end_token_does() -> None:
    table = {(): [0, 0.1, 0.5, 0.4], (2,): [0, 0.3, 0.6, 0.1], (3,): [0, 0.9, 0.1, 0]}
    step = table_steps(table)

    def stop(generated: Sequence[int]) -> bool:
        return tuple(generated[-2:]) == (2, 2)

    assert greedy(step, START, END, 9, stop=stop).ids == (2, 2)
    found = beam(step, START, END, 9, num_beams=2, length_penalty=0.0, num_return=2, stop=stop)
    assert [h.ids for h in found] == [(3, END), (2, 2)]


def test_beams_without_a_continuation_are_dropped() -> None:
    found = beam(table_steps({(): [0, 0.4, 0.6, 0.0]}), START, END, 9, num_beams=3, length_penalty=0.0, num_return=3)
    assert [h.ids for h in found] == [(2, END), (END,)]


@pytest.mark.parametrize("num_return", [0, 3])
def test_a_num_return_that_is_not_between_1_and_num_beams_is_rejected(num_return: int) -> None:
    with pytest.raises(ValueError, match=rf"num_return must be between 1 and num_beams \(2\), got {num_return}"):
        beam(random_steps(4, 0), START, END, 4, num_beams=2, num_return=num_return)


def test_length_penalty_divides_by_a_power_of_the_generated_length() -> None:
    hypothesis = ReferenceHypothesis((5, 6, 2), (-1.0, -2.0, -3.0), -6.0)
    assert hypothesis.penalised_total(1.0) == -2.0
    assert hypothesis.penalised_total(0.0) == -6.0
    assert hypothesis.penalised_total(2.0) == pytest.approx(-6 / 9)
    assert hypothesis.penalised_total(1.0, num_forced=1) == -1.5
