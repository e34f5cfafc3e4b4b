"""Measure how outputs change if a word of the source is hidden, compared with attention weights.

The decoder cannot see the word, or the source lacks it. Shapes use S units of the source (words and
special tokens), T target tokens.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.bench.record import Result, Row
from lab.bench.report import table
from lab.study.bleu import mean_with_interval, percent, with_interval
from lab.study.heads import MARKS, maps_with_rollout
from lab.study.maps import array_of
from lab.study.quality import SPLITS, read_reviews
from lab.study.runs import SOURCE, system_of, translates
from lab.study.sentence import SENTENCE
from lab.study.served import Served, served_models
from lab.zoo.data import corpus_folder
from lab.zoo.dialogues import CHAT, draw_dialogues
from lab.zoo.recall import SEED
from lab.zoo.systems import MULTI30K, SST2
from sightline.base.bundle import Manifest
from sightline.base.text.words import words_of
from sightline.model.data.text import read_lines
from sightline.model.evaluation.defaults import TEST_SPLIT

NAME = "masking"
FloatArray = NDArray[np.float64]
WEIGHTS = {"mean": "", "rollout": ", rollout"}
ENDS = {"mark": "final mark", "end": "`</s>`", "both": "both", "words": "two random words"}


@dataclass
class Explained:
    """An output with its attention weights and the effects of removing each unit of the source."""

    units: Sequence[str]
    target: Sequence[str]
    log_probs: FloatArray  # (T,)
    weights: Mapping[str, FloatArray]  # by the keys of `WEIGHTS`, (T, S)
    drops: dict[str, FloatArray] = field(default_factory=dict)  # by removal, (T, S) in nats; NaN: not removed
    changes: dict[str, FloatArray] = field(default_factory=dict)  # by removal, (T, S): 1 if the prediction changes
    # Effects of hiding the parts of `ENDS`, by part: drops and changes, (2, T).
    ends: dict[str, FloatArray] = field(default_factory=dict)
    distances: tuple[float, float] = (0.0, 0.0)  # from the vector of the mark to those of `</s>` and the word before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundles", type=Path, help="folder of bundles; models without attention are skipped")
    parser.add_argument("data", type=Path, help=f"folder that contains {MULTI30K.folder} and {SST2.folder}")
    parser.add_argument("--sentences", type=int, default=100, help="number of sentences of each test set")


def measure(arguments: argparse.Namespace) -> Result:
    """Explain the outputs for the first test sentences. Classifiers read reviews of SST-2, and chat
    models answer as many generated messages.
    """
    sentences = read_lines(arguments.data / MULTI30K.folder / f"{TEST_SPLIT}.{SOURCE}")[: arguments.sentences]
    dialogues = draw_dialogues(SEED, 9 * len(sentences), has_ghost_attention=True)
    prompts = [dialogue.prompt for dialogue in dialogues if len(dialogue.turns) == 1][: len(sentences)]
    rows: list[Row] = []
    for served, manifest in served_models(arguments.bundles):
        if not manifest.attention:
            continue
        print(manifest.name, flush=True)
        if translates(manifest):
            explained = [explain_translation(served, manifest, text, index) for index, text in enumerate(sentences)]
            if manifest.name == MULTI30K.name:
                rows.append(example(SENTENCE, explain_translation(served, manifest, SENTENCE)))
        elif manifest.labels:
            with TemporaryDirectory() as derived:
                reviews, _ = read_reviews(corpus_folder(SST2, arguments.data, Path(derived)), SPLITS[0])
            explained = [explain_label(served, manifest.name, text) for text in reviews[: arguments.sentences]]
        else:
            explained = [explain_answer(served, manifest.name, prompt) for prompt in prompts]
        rows += [{"kind": "figures", "model": manifest.name, **figure} for figure in figures(explained)]
    return Result(rows=rows)


def explain_translation(served: Served, manifest: Manifest, text: str, seed: int = 0) -> Explained:
    """Translate greedily, then score that translation without each word and special token. Nothing
    is hidden from a model whose attention depends on positions.
    """
    model, kinds = manifest.name, {attention.kind for attention in manifest.attention}
    request = {"model": model, "inputs": text, "parameters": {"split_sentences": False}}
    (generated,) = served.post("/v1/generate", request)
    target = generated["outputs"][0]["text"]
    selection = {"kinds": [kind for kind in ("encoder", "cross") if kind in kinds], "encoding": "base64"}
    (response,) = served.post("/v1/attention", {"model": model, "inputs": text, "targets": target, **selection})
    (output,) = response["outputs"]
    is_normalized = all(entry["normalized"] for entry in output["maps"])
    maps = maps_with_rollout(output)["cross"] if is_normalized else _cross(output)
    has_rollout = is_normalized and "encoder" in kinds
    heads = maps[:, :-1] if has_rollout else maps
    weights = {"mean": heads.mean(axis=(0, 1))} | ({"rollout": maps[-1, -1]} if has_rollout else {})
    words = words_of(text, output["source_offsets"])
    special = [index for index, offsets in enumerate(output["source_offsets"]) if offsets is None]
    groups = [*(word.tokens for word in words), *((index,) for index in special)]
    units = [*(word.text for word in words), *(output["source_tokens"][index] for index in special)]
    deleted = [_without(text, word.start, word.end) for word in words]
    body = {"model": model, "targets": target, "top_logprobs": 1}
    bodies = [{**body, "inputs": source} for source in (text, *deleted)]
    can_hide = all(attention.window is None for attention in manifest.attention if attention.kind == "cross")
    ends = _ends(units, len(words), groups, seed) if can_hide else {}
    hidden = [*groups, *ends.values()] if can_hide else []
    bodies += [{**body, "inputs": text, "hidden_source_tokens": list(group)} for group in hidden]
    whole, *others = (response["outputs"][0]["tokens"] for response in served.post("/v1/score", *bodies))
    log_probs = np.array([token["logprob"] for token in whole])
    explained = Explained(units, [token["text"] for token in whole], log_probs, _merged(weights, groups))
    effects = np.array([_effect(whole, other) for other in others])  # (removals, 2, T)
    _add(explained, "deleted", effects[: len(words)])
    if can_hide:
        _add(explained, "hidden", effects[len(words) : len(words) + len(groups)])
        explained.ends = dict(zip(ends, effects[len(words) + len(groups) :], strict=True))
        if ends:
            explained.distances = _distances(served, model, text)
    return explained


def _cross(output: Mapping[str, Any]) -> FloatArray:
    (weights,) = (array_of(entry) for entry in output["maps"] if entry["kind"] == "cross")
    return weights


def _ends(
    units: Sequence[str], num_words: int, groups: Sequence[Sequence[int]], seed: int
) -> dict[str, tuple[int, ...]]:
    """Return tokens of the parts of `ENDS`; none if the text is short or ends without a mark."""
    mark = num_words - 1
    if len(units) != num_words + 1 or num_words < 4 or units[mark] not in MARKS:
        return {}
    word, other = np.random.default_rng((SEED, seed)).choice(mark, 2, replace=False)
    parts = {"mark": [mark], "end": [num_words], "both": [mark, num_words], "words": [word, other]}
    return {name: tuple(token for unit in part for token in groups[unit]) for name, part in parts.items()}


def _distances(served: Served, model: str, text: str) -> tuple[float, float]:
    """Return the distances of encoder vectors, divided by the length of the mark's vector."""
    (response,) = served.post("/v1/encode", {"model": model, "inputs": text, "pooling": "none"})
    before, mark, end = np.reshape(response["embeddings"][0], response["shapes"][0])[-3:]
    norm = np.linalg.norm(mark)
    return float(np.linalg.norm(mark - end) / norm), float(np.linalg.norm(mark - before) / norm)


def explain_label(served: Served, model: str, text: str) -> Explained:
    """Classify a text without each of its words; the weight of a word is the mean over all rows."""
    body = {"model": model, "inputs": text, "return_attention": {"encoding": "base64"}}
    (output,) = served.post("/v1/classify", body)[0]["outputs"]
    maps = maps_with_rollout(output)["encoder"]
    words = words_of(text, output["source_offsets"])
    weights = {"mean": maps[:, :-1].mean(axis=(0, 1, 2))[None], "rollout": maps[-1, -1].mean(axis=0)[None]}
    label, log_prob = output["labels"][0]["label"], np.log(output["labels"][0]["score"])
    bodies = [{"model": model, "inputs": _without(text, word.start, word.end)} for word in words]
    effects = []
    for response in served.post("/v1/classify", *bodies):
        labels = response["outputs"][0]["labels"]
        (score,) = (candidate["score"] for candidate in labels if candidate["label"] == label)
        effects.append([[log_prob - np.log(score)], [float(labels[0]["label"] != label)]])
    merged = _merged(weights, [word.tokens for word in words])
    explained = Explained([word.text for word in words], [label], np.array([log_prob]), merged)
    _add(explained, "deleted", np.array(effects))
    return explained


def explain_answer(served: Served, model: str, prompt: str) -> Explained:
    """Answer a message, then score that answer without each word of the message."""
    (generated,) = served.post("/v1/generate", {"model": model, "inputs": prompt})
    target = generated["outputs"][0]["text"]
    selection = {"model": model, "inputs": prompt, "targets": target, "encoding": "base64"}
    (output,) = served.post("/v1/attention", selection)[0]["outputs"]
    weights = {"mean": array_of(output["maps"][0]).mean(axis=(0, 1))}  # (T, C)
    message = range(CHAT.user.index("{}"), prompt.rindex(CHAT.reply))
    words = [word for word in words_of(prompt, output["source_offsets"]) if word.start in message]
    texts = [prompt, *(_without(prompt, word.start, word.end) for word in words)]
    bodies = [{"model": model, "inputs": text, "targets": target, "top_logprobs": 1} for text in texts]
    whole, *others = (response["outputs"][0]["tokens"] for response in served.post("/v1/score", *bodies))
    log_probs = np.array([token["logprob"] for token in whole])
    merged = _merged(weights, [word.tokens for word in words])
    explained = Explained([word.text for word in words], [token["text"] for token in whole], log_probs, merged)
    _add(explained, "deleted", np.array([_effect(whole, other) for other in others]))
    return explained


def _without(text: str, start: int, end: int) -> str:
    """Return a text without a word and one of the spaces around it."""
    before = text[:start]
    return (
        (before.removesuffix(" ") + text[end:]).lstrip(" ") if before.endswith(" ") else before + text[end:].lstrip(" ")
    )


def _merged(weights: Mapping[str, FloatArray], groups: Sequence[Sequence[int]]) -> dict[str, FloatArray]:
    """Sum the weights of the tokens of each unit, (T, S)."""
    return {
        name: np.stack([rows[:, list(group)].sum(axis=1) for group in groups], axis=1) for name, rows in weights.items()
    }


def _effect(whole: Sequence[Any], without: Sequence[Any]) -> list[list[float]]:
    """Return the log-probability lost by each target token, and 1 where the prediction changes,
    (2, T).
    """
    pairs = list(zip(whole, without, strict=True))
    drops = [token["logprob"] - other["logprob"] for token, other in pairs]
    return [drops, [float(other["alternatives"][0]["id"] != token["alternatives"][0]["id"]) for token, other in pairs]]


def _add(explained: Explained, removal: str, effects: FloatArray) -> None:
    """Add effects (units, 2, T); units after the last one are not removed."""
    matrix = np.full((2, len(explained.target), len(explained.units)), np.nan)
    matrix[:, :, : len(effects)] = np.moveaxis(effects, 0, -1)
    explained.drops[removal], explained.changes[removal] = matrix


def figures(explained: Sequence[Explained]) -> list[dict[str, Any]]:
    """Return means over target tokens, with intervals from resampling the texts."""
    usable = [output for output in explained if len(output.units) > 2]
    rows: list[dict[str, Any]] = []
    for removal in usable[0].drops:
        for name in usable[0].weights:
            rows += _means([_agreement(output, removal, name) for output in usable], removal=removal, weights=name)
    if with_ends := [output for output in usable if output.ends]:
        rows += _means([_of_ends(output) for output in with_ends], removal="ends", weights="mean")
    return rows


def _means(sums: Sequence[Mapping[str, tuple[float, float]]], **facts: Any) -> list[dict[str, Any]]:
    means = {name: mean_with_interval(np.array([of_text[name] for of_text in sums], np.float64)) for name in sums[0]}
    return [{**facts, "figure": name, **mean} for name, mean in means.items() if mean is not None]


def _agreement(output: Explained, removal: str, name: str) -> dict[str, tuple[float, float]]:
    """Return the number of target tokens and the sum over them of each quantity."""
    removed = ~np.isnan(output.drops[removal][0])
    weights, drops, changes = (
        matrix[:, removed] for matrix in (output.weights[name], output.drops[removal], output.changes[removal])
    )
    rows, units = drops.shape
    each, most, least = np.arange(rows), weights.argmax(axis=1), weights.argmin(axis=1)
    sums = {"tau": kendall_tau(weights, drops), "top": drops.argmax(axis=1) == most, "chance": np.full(rows, 1 / units)}
    for quantity, matrix in (("changed", changes), ("drop", drops)):
        chosen = matrix[each, most]
        sums[f"{quantity}, most"] = chosen
        sums[f"{quantity}, other"] = (matrix.sum(axis=1) - chosen) / (units - 1)
        sums[f"{quantity}, least"] = matrix[each, least]
    return {name: (rows, float(values.sum())) for name, values in sums.items()}


def _of_ends(output: Explained) -> dict[str, tuple[float, float]]:
    """Return sums over the target tokens whose largest weight is on the final mark or `</s>`."""
    weights = output.weights["mean"]
    rows, end = len(weights), weights.shape[1] - 1
    chosen = weights.argmax(axis=1) >= end - 1
    sums: dict[str, tuple[float, float]] = {
        "weight, mark": (rows, float(weights[:, end - 1].sum())),
        "weight, end": (rows, float(weights[:, end].sum())),
        "attend most": (rows, float(chosen.sum())),
        "distance, end": (1, output.distances[0]),
        "distance, word": (1, output.distances[1]),
    }
    for part, (drops, changes) in output.ends.items():
        sums[f"drop, {part}"] = (float(chosen.sum()), float(drops[chosen].sum()))
        sums[f"changed, {part}"] = (float(chosen.sum()), float(changes[chosen].sum()))
        sums[f"changed, all tokens, {part}"] = (rows, float(changes.sum()))
    return sums


def kendall_tau(left: FloatArray, right: FloatArray) -> FloatArray:
    """Return tau-b (Kendall 1945) of rows of two matrices (T, S); 0 if all entries are equal."""
    signs = [np.sign(matrix[:, :, None] - matrix[:, None, :]) for matrix in (left, right)]  # (T, S, S)
    agreement = (signs[0] * signs[1]).sum(axis=(1, 2))
    pairs = np.sqrt(np.abs(signs[0]).sum(axis=(1, 2)) * np.abs(signs[1]).sum(axis=(1, 2)))
    tau: FloatArray = np.divide(agreement, pairs, out=np.zeros_like(agreement), where=pairs > 0)
    return tau


def example(text: str, output: Explained) -> Row:
    """Return what each target token attends to most, and its probability after each removal."""
    tokens = []
    for index, token in enumerate(output.target):
        most = int(output.weights["mean"][index].argmax())
        drops = {name: matrix[index] for name, matrix in output.drops.items()}
        costly = int(np.nanargmax(drops["deleted"]))
        after = {
            "deleted": drops["deleted"][most],
            "hidden": drops["hidden"][most],
            "most costly": drops["deleted"][costly],
            **{part: effects[0][index] for part, effects in output.ends.items() if part != "words"},
        }
        tokens.append(
            {
                "token": token.strip(),
                "probability": _probability(output.log_probs[index]),
                "most_attended": output.units[most],
                "weight": round(float(output.weights["mean"][index, most]), 3),
                "costly": output.units[costly],
                "after": {
                    name: None if np.isnan(drop) else _probability(output.log_probs[index] - drop)
                    for name, drop in after.items()
                },
            }
        )
    return {"kind": "example", "sentence": text, "tokens": tokens}


def _probability(log_prob: float) -> float:
    return round(float(np.exp(log_prob)), 3)


def tables(result: Result) -> Mapping[str, str]:
    rows = [row for row in result.rows if row["kind"] == "figures"]
    by_figure = {(row["model"], row["removal"], row["weights"], row["figure"]): row for row in rows}
    examples = [row for row in result.rows if row["kind"] == "example"]
    parts = {"masking": _agreement_table(by_figure), "masking-ends": _ends_table(by_figure)}
    return parts | ({"masking-example": _example_table(examples[0])} if examples else {})


ByFigure = Mapping[tuple[str, str, str, str], Row]


def _agreement_table(by_figure: ByFigure) -> str:
    head = [
        "system",
        "word",
        "changes, %: most attended",
        "another word",
        "least attended",
        "most attended is most costly, %",
        "by chance",
        "tau",
    ]
    names = ("changed, most", "changed, other", "changed, least", "top", "chance", "tau")
    body = []
    for model, removal, weights in dict.fromkeys(key[:3] for key in by_figure):
        if removal != "ends" and (weights, removal) != ("rollout", "hidden"):  # rollout: the same as with deleted words
            cells = [_cell(by_figure[model, removal, weights, name], name) for name in names]
            body.append([f"`{system_of(model)}`", removal + WEIGHTS[weights], *cells])
    return table(head, body)


def _ends_table(by_figure: ByFigure) -> str:
    head = ["system", "distance of mark and `</s>` (of mark and word)", "tokens"]
    head += [f"changes, %: {text}" for text in ENDS.values()]
    body = []
    for model in dict.fromkeys(key[0] for key in by_figure if key[1] == "ends"):
        of_model = {key[3]: row for key, row in by_figure.items() if key[:2] == (model, "ends")}
        distances = [of_model[f"distance, {name}"]["value"] for name in ("end", "word")]
        cells = [_cell(of_model.get(f"changed, {part}"), "changed") for part in ENDS]
        tokens = of_model["attend most"]
        count = f"{round(tokens['value'] * tokens['count']):,} of {tokens['count']:,}"
        body.append([f"`{system_of(model)}`", f"{distances[0]:.3f} ({distances[1]:.2f})", count, *cells])
    return table(head, body)


def _cell(row: Row | None, name: str) -> str:
    if row is None:
        return "none"
    if name == "chance":
        return f"{100 * row['value']:.0f}"
    if name == "tau":
        return with_interval(row["value"], row["interval"], digits=2)
    return percent(row["value"], row["interval"], digits=1)


def _example_table(row: Row) -> str:
    """Return the tokens for which another word costs more than the most attended one."""
    body = []
    for token in row["tokens"]:
        probabilities = token["probability"], token["after"]["deleted"], token["after"]["most costly"]
        whole, most, costly = ("" if probability is None else f"{probability:.2f}" for probability in probabilities)
        if most != costly:
            names = [f"`{token[name]}`" for name in ("token", "most_attended", "costly")]
            body.append([names[0], whole, names[1], most, names[2], costly])
    text = (
        f"For {len(body)} of the {len(row['tokens'])} tokens, another word is more costly than the most attended one "
        "by 0.01 or more:"
    )
    head = ["token", "probability", "most attended", "without it", "most costly", "without it"]
    return f"{text}\n\n{table(head, body)}"
