"""Perplexity and sample outputs of language models, and the share of replies they reproduce."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.pretrained import PretrainedDecoder
from sightline.model.data.chat_template import dialogue_encoder
from sightline.model.data.encoding import encode_language
from sightline.model.data.examples import Example
from sightline.model.data.records import DialogueRecord, Record, TextRecord
from sightline.model.data.tokenizer_training import decode_ids
from sightline.model.decoding import continue_greedily
from sightline.model.evaluation.length_groups import device_of, grouped, padded
from sightline.model.evaluation.result import Evaluation, Method, Share, only, shortened

MAX_ANSWERS = 50  # dialogues whose last reply is generated
MAX_ANSWER_TOKENS = 128  # longer replies are not compared
NUM_SAMPLES, PROMPT_TOKENS, CONTINUATION_TOKENS = 3, 16, 32  # of samples of plain texts
CHUNK_TOKENS = 512  # tokens whose logits are in memory at once


@torch.inference_mode()
def likelihoods(model: CausalModel | PretrainedDecoder, examples: Sequence[Example]) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood in nats (N,) of the tokens of each example that have loss,
    and their number (N,).
    """
    device = device_of(model)
    nats, counts = torch.zeros(len(examples), dtype=torch.float64), torch.zeros(len(examples), dtype=torch.int64)
    for group in grouped([len(ids) for ids, _ in examples]):
        ids, _ = padded([examples[index][0] for index in group], model.config.pad_id, device)
        is_counted, _ = padded([examples[index][1] for index in group], 0, device)
        features, _ = model.hidden_states(ids[:, :-1])
        is_target = is_counted[:, 1:].bool()  # a token is predicted from the features before it
        hidden, targets = features[is_target], ids[:, 1:][is_target]  # (N, M), (N,)
        owners = torch.tensor(group)[is_target.nonzero()[:, 0].cpu()]
        for start in range(0, len(targets), CHUNK_TOKENS):
            logits = model.logits(hidden[start : start + CHUNK_TOKENS]).float()
            costs = functional.cross_entropy(logits, targets[start : start + CHUNK_TOKENS], reduction="none").double()
            nats.index_add_(0, owners[start : start + CHUNK_TOKENS], costs.cpu())
        counts.index_add_(0, owners, torch.ones_like(owners))
    return nats, counts


def perplexity(nats: float, count: int) -> float:
    """Return exp(nats / count), or infinity if it is too large."""
    mean = nats / count if count else math.nan
    return math.exp(mean) if not mean > 700 else math.inf


@dataclass(frozen=True)
class ComparedReply:
    """Generated and expected last reply of a dialogue."""

    number: int  # of the record
    message: str  # the message before the reply
    expected: str
    given: str

    @property
    def is_exact(self) -> bool:
        return self.given == self.expected


def answer_dialogues(
    model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, records: Sequence[Record]
) -> list[ComparedReply]:
    """Generate the last reply of the first `MAX_ANSWERS` dialogues by greedy decoding. Dialogues
    that are too long for the model or end with a reply of more than `MAX_ANSWER_TOKENS` are
    skipped.
    """
    if not any(isinstance(record, DialogueRecord) for record in records):
        return []
    encoder, positions = dialogue_encoder(model.config, tokenizer), model.config.max_positions
    end_ids = encoder.end_token(), model.config.eos_id
    asked = list[tuple[int, str, list[int], list[int]]]()  # number of the record, message, prompt and reply
    for number, record in enumerate(records):
        if not isinstance(record, DialogueRecord) or len(asked) == MAX_ANSWERS:
            continue
        replies = [index for index, message in enumerate(record.messages) if message.role == "assistant"]
        read = record.messages[: replies[-1] if replies else 0]
        if not any(message.role == "user" for message in read):
            continue
        prompt = encoder.prompt(replace(record, messages=read))
        # Only the last reply is marked.
        marked = [replace(message, has_loss=False) for message in read]
        marked.append(replace(record.messages[len(read)], has_loss=True))
        (whole, _), *_ = encoder.encode(replace(record, messages=tuple(marked)), positions)
        reply = list(whole[len(prompt) :])
        if list(whole[: len(prompt)]) == prompt and len(whole) <= positions and len(reply) <= MAX_ANSWER_TOKENS:
            asked.append((number, read[-1].content, prompt, reply))
    outputs = dict[int, list[int]]()
    for group in grouped([len(prompt) + len(reply) for *_, prompt, reply in asked]):
        # A longer answer could not equal the expected one.
        longest = max(len(asked[index][3]) for index in group)
        generated = continue_greedily(model, [asked[index][2] for index in group], end_ids, longest)
        outputs.update(zip(group, generated, strict=True))
    return [
        ComparedReply(number, message, decode_ids(tokenizer, reply), decode_ids(tokenizer, outputs[index]))
        for index, (number, message, _, reply) in enumerate(asked)
    ]


def _described(record: TextRecord | DialogueRecord) -> dict[str, Any]:
    """Return a text, or the messages and tools of a dialogue, without what is empty."""
    if isinstance(record, TextRecord):
        return {"text": record.text}
    messages = [
        {name: value for name, value in asdict(message).items() if name == "content" or (value and name != "has_loss")}
        for message in record.messages
    ]
    return {"messages": messages, **({"tools": list(record.tools)} if record.tools else {})}


def continuations(model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Continue the first tokens of each text by greedy decoding, and describe the result."""
    records = [TextRecord(text) for text in texts]
    encoded = encode_language(tokenizer, records, model.config, model.config.max_positions)
    prompts = [list(parts[0][0])[:PROMPT_TOKENS] for parts in encoded]
    prompts = [prompt[:-1] if prompt[-1] == model.config.eos_id else prompt for prompt in prompts]
    generated = continue_greedily(model, prompts, [model.config.eos_id], CONTINUATION_TOKENS)
    return [
        f"{shortened(decode_ids(tokenizer, prompt))} → {shortened(decode_ids(tokenizer, [*prompt, *ids]))}"
        for prompt, ids in zip(prompts, generated, strict=True)
    ]


def evaluate_language(
    model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, records: Sequence[Record]
) -> Evaluation:
    """Return the perplexity, and for dialogues the percentage of last replies that the model
    reproduces.
    """
    texts: list[TextRecord | DialogueRecord] = only(records, TextRecord, DialogueRecord)
    encoded = encode_language(tokenizer, texts, model.config, model.config.max_positions)
    windows = [(number, one) for number, parts in enumerate(encoded) for one in parts]
    fitting = [(number, one) for number, one in windows if len(one[0]) <= model.config.max_positions]
    nats, counts = likelihoods(model, [one for _, one in fitting])
    owners = torch.tensor([number for number, _ in fitting], dtype=torch.int64)
    totals = torch.zeros(len(texts), 2, dtype=torch.float64).index_add_(0, owners, torch.stack([nats, counts], dim=1))
    rows: list[dict[str, Any]] = [
        {**_described(text), "perplexity": round(perplexity(*total), 4) if total[1] else None}
        for text, total in zip(texts, totals.tolist(), strict=True)
    ]
    answers, num_tokens = answer_dialogues(model, tokenizer, texts), int(counts.sum())
    metrics = {"perplexity": perplexity(nats.sum().item(), num_tokens)}
    methods = {"perplexity": Method(len(records))}
    for answer in answers:
        rows[answer.number] |= {"expected": answer.expected, "output": answer.given}
    if answers:
        exact = Share(sum(answer.is_exact for answer in answers), len(answers))
        metrics["exact answers"] = 100 * exact.value
        methods["exact answers"] = Method(exact.total, "greedy", interval=exact.percent_interval)
    samples = [
        f"message: {shortened(one.message)} | expected: {shortened(one.expected)} | output: {shortened(one.given)}"
        for one in answers[:NUM_SAMPLES]
    ]
    plain = [record.text for record in texts if isinstance(record, TextRecord)][: NUM_SAMPLES - len(samples)]
    samples += continuations(model, tokenizer, plain) if plain else []
    details = {"tokens": num_tokens, "skipped_as_too_long": len(windows) - len(fitting)}
    return Evaluation(metrics, tuple(samples), methods, rows, details)
