from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from lab.study.ghost_attention import (
    InstructionAttention,
    draw_script,
    instruction_attention,
    instruction_columns,
    run_dialogues,
)
from lab.study.served import serve
from lab.zoo.instructions import KINDS, Kind
from lab.zoo.recall import MAX_ANSWER_TOKENS, greedy_answers
from lab.zoo.systems import bundle_name
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model
from sightline.model.data.tokenizer_training import encode_lines, prompt_tokenizer

GATT = bundle_name("chat-gatt")


def test_figures_are_means_over_the_responses_tokens() -> None:
    weights = np.zeros((2, 2, 2, 5))  # two layers, two heads; two tokens, which run_dialogues four and five
    weights[0, 0, 0, 1:3] = [0.5, 0.1]
    weights[1, 1, 0, 2] = 0.2
    weights[1, 0, 1, 1] = 0.4
    expected = InstructionAttention(
        largest=(0.5 + 0.4) / 2, share=100 * (0.6 + 0.2 + 0.4) / 8, uniform=100 * (2 / 4 + 2 / 5) / 2
    )
    found = instruction_attention(weights, [1, 2])
    assert (found.largest, found.share, found.uniform) == pytest.approx(
        (expected.largest, expected.share, expected.uniform)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_columns_select_the_instructions_tokens_in_every_turn(kind: Kind, chats: Path) -> None:
    script = draw_script(Random(2), kind, 3)
    with serve(chats / "bundles") as served:
        columns = instruction_columns(served, GATT, script)
        for one in script.plain:
            body = {"model": GATT, "inputs": script.prompt, "add_special_tokens": True}
            (tokens,) = served.post("/v1/tokenize", body)[0]["outputs"]
            assert "".join(tokens[index]["text"] for index in columns).strip() == script.instruction.text
            script.add_answer(one.answer)


def test_figures_from_served_maps_equal_those_from_pytorchs(chats: Path) -> None:
    model, tokenizer = load_model(chats / "checkpoint")
    assert isinstance(model, CausalModel)
    script = draw_script(Random(3), "ending", 2)
    with serve(chats / "bundles") as served:
        columns = instruction_columns(served, GATT, script)
        (_, (look,)) = run_dialogues(served, GATT, [script])
    again = draw_script(Random(3), "ending", 2)
    again.add_answer(script.said[0].answer)
    assert list(greedy_answers(model, tokenizer)([again.prompt])) == [script.said[1].answer]
    (read,) = encode_lines(prompt_tokenizer(tokenizer), [again.prompt])
    ids = list(read)
    with torch.inference_mode():
        while len(ids) - len(read) < MAX_ANSWER_TOKENS and ids[-1] != model.config.eos_id:
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        _, maps = model.hidden_states(torch.tensor([ids[:-1]]), need_weights=True)
    assert maps is not None
    expected = instruction_attention(maps[:, 0, :, len(read) - 1 :].numpy(), columns)
    assert look.largest == pytest.approx(expected.largest, abs=1e-5)
    assert look.share == pytest.approx(expected.share, abs=1e-3)
    assert look.uniform == pytest.approx(expected.uniform)
