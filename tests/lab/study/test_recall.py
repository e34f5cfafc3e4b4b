from pathlib import Path
from random import Random

from lab.study.recall import served_responses
from lab.study.served import serve
from lab.zoo.dialogues import CONDITIONS, draw_parts
from lab.zoo.instructions import KINDS
from lab.zoo.recall import Script, greedy_answers
from lab.zoo.systems import bundle_name
from sightline.model.architectures.causal import CausalModel
from sightline.model.checkpoint import load_model


def test_served_responses_equal_pytorchs(chats: Path) -> None:
    """Use more dialogues than fit one call, of different lengths."""
    model, tokenizer = load_model(chats / "checkpoint")
    assert isinstance(model, CausalModel)
    rng = Random(1)
    scripts = [Script(*draw_parts(rng, kind, 4, CONDITIONS["trained"])) for kind in KINDS for _ in range(9)]
    for index, script in enumerate(scripts):
        for one in script.plain[: index % 4]:
            script.add_answer(one.answer)
    prompts = [script.prompt for script in scripts]
    expected = greedy_answers(model, tokenizer)(prompts)
    assert len(set(expected)) > len(prompts) / 2
    with serve(chats / "bundles") as served:
        assert served_responses(served, bundle_name("chat-gatt"))(prompts) == expected
