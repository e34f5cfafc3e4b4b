"""Comparison of Transformers, the reference of verification, and graphs."""

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, processors

from sightline.base.bundle import Manifest, is_entailment
from sightline.export.check.numpy_reference import log_softmax
from sightline.export.check.verify import ComparedTexts, GraphRunner, compared_rows, reference_outputs, rounding_limits
from sightline.export.families import predictions
from sightline.export.families.description import Description
from sightline.export.families.table import describe, find_family
from sightline.export.families.weights import Weights
from sightline.export.sources.opened_checkpoint import Folder, Tensors
from tests.export.graph_bundles import write_bundle
from tests.support.tensors import tensors_of

Array = NDArray[Any]
Outputs = Mapping[str, Array]

TOLERANCE = 1e-4  # of logits and hidden states of float32, as for each exported bundle
# If scores of attention differ by at most d, a weight p differs by at most 2 * p * (1 - p) * d to
# first order, and that is at most d / 2. Scores have the tolerance of logits.
MAP_TOLERANCE = TOLERANCE / 2
CLS, SEP = 101, 102
# Adds special tokens and token types as BERT does.
TOKENIZER = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
TOKENIZER.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))

COMPUTED_IN_FLOAT64 = (
    "bert", "roberta", "xlm-roberta", "camembert", "electra", "mpnet", "distilbert", "albert", "deberta-v2", "gpt2",
    "marian", "bart", "mbart", "pegasus",
)  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A checkpoint as the importer describes it."""

    folder: Path
    model: Description
    weights: Weights

    def outputs(self, texts: ComparedTexts) -> dict[str, Array]:
        """Return what the reference of verification computes."""
        return reference_outputs(self.model, self.weights, texts)

    def graph_outputs(self, texts: ComparedTexts, positions: int = 40) -> dict[str, Array]:
        """Return what the graphs compute for texts in one batch, the longest text first."""
        runner = GraphRunner(self.folder, self.write_bundle(positions), self.model)
        return runner.run(texts.sources, texts.targets, 1)[1]

    def write_bundle(self, positions: int = 40) -> Manifest:
        """Write the graphs beside the checkpoint."""
        return write_bundle(self.folder, self.model, self.weights, positions)


def describe_folder(
    opened: Folder, tensors: Tensors | None = None, tokenizer: Tokenizer | None = TOKENIZER, **options: Any
) -> Imported:
    """Describe a checkpoint, and check that all its keys are known.

    The folder must stay open while its weights are read, unless there are other tensors.
    """
    stored = opened.tensors if tensors is None else tensors
    described = describe(find_family(opened.config), opened.config, stored, tokenizer, **options)
    opened.config.check_all_read()
    return Imported(opened.path, *described)


def import_folder(
    folder: Path, tokenizer: Tokenizer | None = TOKENIZER, *, has_more_tensors: bool = False, **options: Any
) -> Imported:
    """Describe a checkpoint, whose weights stay in memory.

    All its tensors must be known, too, unless it `has_more_tensors`.
    """
    opened = Folder(folder)
    # Numbers of positions are integers, which no model reads.
    names = [name for name in opened.tensors.names if not name.endswith("_ids")]
    tensors = tensors_of({name: opened.tensors.read(name) for name in names})
    imported = describe_folder(opened, tensors, tokenizer, **options)
    if not has_more_tensors:
        imported.outputs(ComparedTexts(((5,),), ((5,),)))
        tensors.check_all_read()
    return imported


def random_texts(hf: Any, lengths: Sequence[int], targets: Sequence[int] = ()) -> ComparedTexts:
    """Return texts of ordinary tokens, of which those of at least four tokens are text pairs.

    Args:
        hf: the model, in whose vocabulary the tokens are.
        lengths: numbers of tokens of the sources.
        targets: numbers of tokens that the decoder of an encoder-decoder reads.
    """
    draw, size = np.random.default_rng(0), hf.config.vocab_size
    first, start, end = (110, CLS, SEP) if size > SEP else (3, 3, hf.config.eos_token_id)
    sources = [[start, *draw.integers(first, size - 1, length - 1).tolist()] for length in lengths]
    for source in sources:
        source[-1] = end if size <= SEP or len(source) >= 4 else source[-1]
        source[len(source) // 2] = end if len(source) >= 4 else source[len(source) // 2]
    size = getattr(hf.config, "decoder_vocab_size", None) or size
    start = getattr(hf.config, "decoder_start_token_id", None) or 0
    decoded = [(start, *draw.integers(3, size - 1, length - 1).tolist()) for length in targets]
    return ComparedTexts(tuple(map(tuple, sources)), tuple(decoded) or tuple(map(tuple, sources)))


def token_types(ids: Sequence[int]) -> list[int]:
    """Return the token types of BERT: 1 after the first separator."""
    first = ids.index(SEP) if SEP in ids else len(ids)
    return [int(index > first) for index in range(len(ids))]


@torch.no_grad()
def hf_outputs(hf: Any, texts: ComparedTexts) -> dict[str, Array]:
    """Run a model of Transformers on each text alone.

    Returns:
        The arrays of `reference_outputs`.
    """
    outputs: dict[str, Array] = {}
    for number, source in enumerate(texts.sources):
        if hf.config.is_encoder_decoder and not type(hf).__name__.endswith("EncoderModel"):
            found = _seq2seq_outputs(hf, source, texts.targets[number])
        elif hasattr(hf, "lm_head") and not type(hf).__name__.endswith("ForMaskedLM"):
            output = hf(torch.tensor([source]), output_attentions=True, output_hidden_states=True, use_cache=False)
            found = {"hidden": output.hidden_states[-1][0], "logits": output.logits[0], "decoder": output.attentions}
        else:
            found = _encoder_outputs(hf, source)
        for kind, value in found.items():
            array = (torch.stack([one[0] for one in value]) if isinstance(value, tuple) else value).numpy()
            if kind in ("encoder", "decoder", "cross"):
                array = array[:, :, compared_rows(array.shape[2])]
            elif kind in ("logits", "predictions"):
                array = array[compared_rows(len(array))]
            outputs[f"{kind}.{number}"] = array
    return outputs


def _seq2seq_outputs(hf: Any, source: Sequence[int], target: Sequence[int]) -> dict[str, Any]:
    """Return the outputs of an encoder-decoder.

    The decoder of a classifier reads the source, too.
    """
    is_classifier = type(hf).__name__.endswith("ForSequenceClassification")
    options = {} if is_classifier else {"decoder_input_ids": torch.tensor([target]), "use_cache": False}
    output = hf(input_ids=torch.tensor([source]), output_attentions=True, **options)
    found = {"hidden": output.encoder_last_hidden_state[0], "encoder": output.encoder_attentions}
    if is_classifier:
        return found | _labels(hf, output.logits[0])
    # The head of a checkpoint without one is tied to the embedding.
    logits = output.logits if "logits" in output else output.last_hidden_state @ hf.shared.weight.T
    return found | {"logits": logits[0], "cross": output.cross_attentions, "decoder": output.decoder_attentions}


def _encoder_outputs(hf: Any, source: Sequence[int]) -> dict[str, Any]:
    options, encoded = {}, list[Any]()
    if getattr(hf.config, "type_vocab_size", 1) == 2 and "token_type_ids" in inspect.signature(hf.forward).parameters:
        options["token_type_ids"] = torch.tensor([token_types(source)])
    hook = hf.base_model.register_forward_hook(lambda module, inputs, output: encoded.append(output))
    output = hf(input_ids=torch.tensor([source]), output_attentions=True, **options)
    hook.remove()
    found = {"hidden": encoded[0].last_hidden_state[0], "encoder": output.attentions}
    if "start_logits" in output:
        found["labels"] = torch.stack([output.start_logits[0], output.end_logits[0]], dim=-1)
    elif type(hf).__name__.endswith("ForMaskedLM"):
        if hf.config.model_type in predictions.FAMILIES:
            found["predictions"] = output.logits[0]
    elif "logits" in output and not type(hf).__name__.endswith("ForPreTraining"):
        found |= _labels(hf, output.logits[0])
    return found


def _labels(hf: Any, logits: Any) -> dict[str, Any]:
    """Return logits as the graphs return them: exclusive classes have log-probabilities."""
    if hf.config.num_labels == 1 or hf.config.problem_type == "multi_label_classification":
        return {"labels": logits}
    logprobs = torch.from_numpy(log_softmax(logits.numpy()))
    has_logits = any(map(is_entailment, hf.config.id2label.values()))
    return {"labels": logprobs} | ({"label_logits": logits} if has_logits else {})


def assert_equals_transformers(imported: Imported, hf: Any, texts: ComparedTexts) -> None:
    """Compare the reference of verification with a model of Transformers in float64.

    Transformers always computes rotary embedding, RMS norms and some attention in float32.
    """
    expected, given = hf_outputs(copy.deepcopy(hf).double(), texts), imported.outputs(texts)
    is_exact = hf.config.model_type in COMPUTED_IN_FLOAT64
    assert given.keys() == expected.keys()
    for name, array in expected.items():
        assert 0.03 < np.abs(array).mean() < 30 or not name.startswith(("hidden", "logits", "labels"))
        limit = (1e-12 if is_exact else TOLERANCE) * max(1.0, float(np.abs(array).max()))
        assert_allclose(given[name], array, rtol=0, atol=limit, err_msg=name)


def assert_graphs_equal_the_reference(imported: Imported, texts: ComparedTexts) -> None:
    """Compare the graphs with the reference; the longest text is the first of one batch."""
    expected, limits = rounding_limits(imported.model, imported.weights, texts)
    for name, given in imported.graph_outputs(texts).items():
        exists = ~np.isnan(given)  # logits of the last token of a prompt
        assert exists.any()
        assert_allclose(given[exists], expected[name][exists], rtol=0, atol=limits[name], err_msg=name)
