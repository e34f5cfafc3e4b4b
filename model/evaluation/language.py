"""Perplexity and sample outputs of language models, and the share of replies they reproduce."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from sightline.base.errors import UsageError
from sightline.model.architectures.causal import CausalModel
from sightline.model.architectures.pretrained import PretrainedDecoder
from sightline.model.data.chat_format import IM_END, exchanges
from sightline.model.data.chat_template import DialogueEncoder, encode_records, end_token, read_chat_template
from sightline.model.data.encoding import encode, encode_prompt
from sightline.model.data.examples import Example
from sightline.model.data.records import DialogueRecord, Record, TextRecord
from sightline.model.data.tokenizer_training import decode_ids, special_id
from sightline.model.decoding.batched import continue_greedily
from sightline.model.evaluation.length_groups import device_of, grouped, padded
from sightline.model.evaluation.result import Evaluation, Method, shortened
from sightline.model.evaluation.share import Share

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


class _Chat:
    """Prompts of a chat model, and the tokens that end its replies."""

    def __init__(self, model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._encoder = tokenizer, None
        if isinstance(model, PretrainedDecoder):
            template = read_chat_template(model.config)
            if template is None:
                raise UsageError("the model has no chat template, so it cannot be evaluated on dialogues")
            self._encoder = DialogueEncoder(template, tokenizer)
            self.end_ids: tuple[int, ...] = (end_token(model.config, tokenizer), model.config.eos_id)
        else:
            self.end_ids = (special_id(tokenizer, IM_END), model.config.eos_id)

    def prompt(self, record: DialogueRecord) -> list[int]:
        if self._encoder is None:
            return encode_prompt(self._tokenizer, record.messages)
        return self._encoder.prompt(record)


def encode_all(
    model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, records: Sequence[TextRecord | DialogueRecord]
) -> list[list[Example]]:
    """Encode each record in windows of the positions of a model."""
    if isinstance(model, PretrainedDecoder):
        return encode_records(model.config, tokenizer, records, model.config.max_positions)
    return [encode(tokenizer, [record], max_length_tokens=model.config.max_positions) for record in records]


def answer_dialogues(
    model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, records: Sequence[Record]
) -> list[ComparedReply]:
    """Generate the last reply of the first `MAX_ANSWERS` dialogues by greedy decoding. Dialogues
    that are too long for the model or end with a reply of more than `MAX_ANSWER_TOKENS` are
    skipped.
    """
    if not _has_dialogue(records):
        return []
    chat = _Chat(model, tokenizer)
    prompts, replies, messages = list[list[int]](), list[list[int]](), list[tuple[int, str]]()
    for number, record in enumerate(records):
        if not isinstance(record, DialogueRecord) or len(prompts) == MAX_ANSWERS:
            continue
        read = [message for exchange in exchanges(record.messages) for message in exchange][:-1]
        if not any(message.role == "user" for message in read):
            continue
        prompt = chat.prompt(replace(record, messages=tuple(read)))
        # Only the last reply is marked.
        marked = [replace(message, has_loss=False) for message in read]
        marked.append(replace(record.messages[len(read)], has_loss=True))
        ((whole, is_counted), *_), *_ = encode_all(model, tokenizer, [replace(record, messages=tuple(marked))])
        # Templates write text after the token that ends a reply, such as a line break.
        reply = list(whole[len(prompt) : len(is_counted) - list(reversed(is_counted)).index(1)])
        if (
            list(whole[: len(prompt)]) == prompt
            and len(whole) <= model.config.max_positions
            and len(reply) <= MAX_ANSWER_TOKENS
        ):
            prompts.append(prompt)
            replies.append(reply)
            messages.append((number, read[-1].content))
    outputs = [list[int]()] * len(prompts)
    for group in grouped([len(prompt) + len(reply) for prompt, reply in zip(prompts, replies, strict=True)]):
        # A longer answer could not equal the expected one.
        longest = max(len(replies[index]) for index in group)
        generated = continue_greedily(model, [prompts[index] for index in group], chat.end_ids, longest)
        for index, ids in zip(group, generated, strict=True):
            outputs[index] = ids
    return [
        ComparedReply(*message, decode_ids(tokenizer, reply), decode_ids(tokenizer, ids))
        for message, reply, ids in zip(messages, replies, outputs, strict=True)
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


def _has_dialogue(records: Sequence[Record]) -> bool:
    return any(isinstance(record, DialogueRecord) for record in records)


def exact_answers(answers: Sequence[ComparedReply]) -> Share:
    """Return the share of replies that the model reproduces."""
    return Share(sum(answer.is_exact for answer in answers), len(answers))


def continuations(model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, texts: Sequence[str]) -> list[str]:
    """Continue the first tokens of each text by greedy decoding, and describe the result."""
    records = [TextRecord(text) for text in texts]
    prompts = [list(parts[0][0])[:PROMPT_TOKENS] for parts in encode_all(model, tokenizer, records)]
    prompts = [prompt[:-1] if prompt[-1] == model.config.eos_id else prompt for prompt in prompts]
    generated = continue_greedily(model, prompts, [model.config.eos_id], CONTINUATION_TOKENS)
    return [
        f"{shortened(decode_ids(tokenizer, prompt))} → {shortened(decode_ids(tokenizer, [*prompt, *ids]))}"
        for prompt, ids in zip(prompts, generated, strict=True)
    ]


def language_fields(
    model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, records: Sequence[Record]
) -> dict[str, Any]:
    """Return the perplexity and the exact answers of a model as fields of a report."""
    texts = [record for record in records if isinstance(record, TextRecord | DialogueRecord)]
    windows = [(number, one) for number, parts in enumerate(encode_all(model, tokenizer, texts)) for one in parts]
    fitting = [(number, one) for number, one in windows if len(one[0]) <= model.config.max_positions]
    nats, counts = likelihoods(model, [one for _, one in fitting])
    fields: dict[str, Any] = {
        "records": len(records),
        "tokens": int(counts.sum()),
        "skipped_as_too_long": len(windows) - len(fitting),
        "perplexity": perplexity(nats.sum().item(), int(counts.sum())),
    }
    owners = torch.tensor([number for number, _ in fitting], dtype=torch.int64)
    totals = torch.zeros(len(texts), 2, dtype=torch.float64).index_add_(0, owners, torch.stack([nats, counts], dim=1))
    rows: list[dict[str, Any]] = [
        {**_described(text), "perplexity": round(perplexity(*total), 4) if total[1] else None}
        for text, total in zip(texts, totals.tolist(), strict=True)
    ]
    answers = answer_dialogues(model, tokenizer, texts)
    for answer in answers:
        rows[answer.number] |= {"expected": answer.expected, "output": answer.given}
    if answers:
        share = exact_answers(answers)
        interval = [round(100 * end, 2) for end in share.interval]
        exact = {"dialogues": share.total, "exact": share.count, "percent": round(100 * share.value, 2)}
        fields["exact_answers"] = {**exact, "interval_95": interval}
    return {**fields, "predictions": rows, "samples": samples(model, tokenizer, records, answers)}


def samples(
    model: CausalModel | PretrainedDecoder,
    tokenizer: Tokenizer,
    records: Sequence[Record],
    answers: Sequence[ComparedReply],
) -> list[str]:
    """Return lines that show some outputs."""
    lines = [
        f"message: {shortened(pair.message)} | expected: {shortened(pair.expected)} | output: {shortened(pair.given)}"
        for pair in answers[:NUM_SAMPLES]
    ]
    texts = [record.text for record in records if isinstance(record, TextRecord)][: NUM_SAMPLES - len(lines)]
    return [*lines, *(continuations(model, tokenizer, texts) if texts else [])]


def evaluate_language(
    model: CausalModel | PretrainedDecoder, tokenizer: Tokenizer, records: Sequence[Record]
) -> Evaluation:
    """Return the perplexity, and for dialogues the percentage of replies that are reproduced."""
    return language_evaluation(language_fields(model, tokenizer, records))


def language_evaluation(fields: Mapping[str, Any]) -> Evaluation:
    """Return the metrics among fields of `language_fields`."""
    metrics, methods = {"perplexity": fields["perplexity"]}, {"perplexity": Method(fields["records"])}
    if "exact_answers" in fields:
        exact = fields["exact_answers"]
        metrics["exact answers"] = exact["percent"]
        methods["exact answers"] = Method(exact["dialogues"], "greedy", interval=exact["interval_95"])
    return Evaluation(metrics, tuple(fields["samples"]), methods)
