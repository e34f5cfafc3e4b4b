"""`python -m model train | evaluate | accuracy | recall | zoo`: the command line of this package."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from model.architectures.causal import CausalModel
from model.architectures.classifier import Classifier
from model.checkpoint import WEIGHTS, load_checkpoint, load_facts, load_model, replace_text
from model.config import ModelConfig, with_fields
from model.data.text import read_labelled
from model.decoding.reference import one_thread
from model.evaluation.accuracy import accuracy, accuracy_facts
from model.evaluation.bleu import TEST_SPLIT, Scores, read_test_set, score, tokenised_path, translate
from model.evaluation.recall import SEED, TURNS, greedy_answers, recall
from model.systems import PLAN, SYSTEMS, System
from model.training.classification import CLASSIFICATION
from model.training.config import PRECISIONS, Precision, TrainConfig, read_train_config
from model.training.trainer import Trainer
from model.training.translation import TRANSLATION

NUM_DIALOGUES = 25  # of each kind of instruction and each length

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_command(
    commands: Commands, name: str, action: Callable[[argparse.Namespace], None], text: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.set_defaults(action=action)
    return parser


def add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, help="folder with config.json, weights.safetensors, tokenizer.json")


def add_train(commands: Commands) -> None:
    text = "train from a folder of data; run again with the same arguments to resume"
    parser = add_command(commands, "train", train, text)
    parser.add_argument(
        "data",
        type=Path,
        nargs="?",
        help="folder with train.SOURCE, train.TARGET and val.*, or train.tsv, dev.tsv; not given for systems that "
        "generate their own dialogues (chat-...)",
    )
    parser.add_argument("--run", type=Path, required=True, help="folder for checkpoints and the log")
    parser.add_argument("--system", choices=SYSTEMS, default="transformer", help="what to train")
    parser.add_argument(
        "--model",
        nargs="+",
        default=[],
        type=_field,
        metavar="FIELD=VALUE",
        help="fields of the model's configuration (model/config.py) that differ from the system's, as cell=lstm",
    )
    for field in dataclasses.fields(TrainConfig):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(
            option, type=type(field.default), default=argparse.SUPPRESS, help="default: the system's own"
        )


def _field(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text} is not FIELD=VALUE")
    return name, value


def train(arguments: argparse.Namespace) -> None:
    system, changes = SYSTEMS[arguments.system], dict(arguments.model)
    data = _training_data(arguments.system, arguments.data)

    def make_config(vocab_size: int) -> ModelConfig:
        return with_fields(system.make_config(vocab_size), changes)

    names = {field.name for field in dataclasses.fields(TrainConfig)}
    settings = {**system.training, **{name: value for name, value in vars(arguments).items() if name in names}}
    config = TrainConfig(**settings)
    trainer = Trainer(arguments.run, config, system.task, data, make_config)
    vocab_size = trainer.tokenizer.get_vocab_size()
    if vocab_size < config.vocab_size:
        print(
            f"note: the vocabulary has {vocab_size} tokens, not vocab_size ({config.vocab_size}): the training data "
            "has no more pairs to merge",
            file=sys.stderr,
        )
    trainer.fit()


def _training_data(name: str, data: Path | None) -> Path:
    """Check that a folder of data is given to a system that reads one, and to no other."""
    makes_its_own = not SYSTEMS[name].corpus.folder
    if makes_its_own and data is not None:
        raise ValueError(f"{name} generates its own dialogues and would not read {data}; leave out DATA")
    if not makes_its_own and data is None:
        raise ValueError(f"{name} is trained from a folder of data: python -m model train DATA --run RUN")
    return data or Path()


def add_evaluate(commands: Commands) -> None:
    parser = add_command(commands, "evaluate", evaluate, "translate a test set by reference beam search and score it")
    add_checkpoint(parser)
    parser.add_argument("data", type=Path, help="folder with SPLIT.SOURCE, SPLIT.TARGET, SPLIT.lc.norm.tok.TARGET")
    parser.add_argument("--split", default=TEST_SPLIT, help="what the test set's files begin with")
    parser.add_argument("--source", default="en", help="file ending of the source side")
    parser.add_argument("--target", default="de", help="file ending of the target side")
    parser.add_argument("--num-beams", type=int, default=5, help="open hypotheses")
    parser.add_argument("--length-penalty", type=float, default=1.0, help="exponent of the length that divides a score")
    parser.add_argument("--limit", type=int, help="only the first so many sentences")
    parser.add_argument("--json", type=Path, help="also write the scores and outputs to this file")


def evaluate(arguments: argparse.Namespace) -> None:
    checkpoint, data, split, target = arguments.checkpoint, arguments.data, arguments.split, arguments.target
    settings = arguments.num_beams, arguments.length_penalty, arguments.limit
    scores, report = evaluated(checkpoint, data, split, arguments.source, target, *settings)
    tokenised = f"BLEU {scores.tokenised_bleu}"
    if scores.tokenised_bleu is None:
        tokenised = f"left out: there is no {tokenised_path(data, split, target)}"
    print(f"tok-lc: {tokenised}")
    print(f"detok, cased: BLEU {scores.bleu}; chrF {scores.chrf}")
    if arguments.json is not None:
        write_json(arguments.json, report)


def evaluated(
    checkpoint: Path,
    data: Path,
    split: str,
    source: str,
    target: str,
    num_beams: int = 5,
    length_penalty: float = 1.0,
    limit: int | None = None,
) -> tuple[Scores, dict[str, Any]]:
    """A checkpoint's scores on a test set, and what is written of them."""
    model, tokenizer = load_checkpoint(checkpoint)
    test_set = read_test_set(data, split, source, target, limit)
    outputs = translate(model, tokenizer, test_set.sources, num_beams, length_penalty)
    scores = score(outputs, test_set, target)
    return scores, {
        "split": split,
        "sentences": len(outputs),
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "checkpoint": load_facts(checkpoint / WEIGHTS),
        **dataclasses.asdict(scores),
        "outputs": outputs,
    }


def write_json(path: Path, report: Mapping[str, Any]) -> None:
    replace_text(path, json.dumps(report, indent=2, ensure_ascii=False) + "\n")


def add_accuracy(commands: Commands) -> None:
    parser = add_command(commands, "accuracy", print_accuracy, "how often a classifier is right, as JSON")
    add_checkpoint(parser)
    parser.add_argument("data", type=Path, help="folder with SPLIT.tsv")
    parser.add_argument("--split", default="dev", help="what is classified")


def print_accuracy(arguments: argparse.Namespace) -> None:
    print(json.dumps(accuracy_report(arguments.checkpoint, arguments.data, arguments.split), indent=2))


def accuracy_report(checkpoint: Path, data: Path, split: str) -> dict[str, Any]:
    model, tokenizer = load_model(checkpoint)
    if not isinstance(model, Classifier):
        raise ValueError(f"{checkpoint} does not classify")
    found = accuracy(model, tokenizer, *read_labelled(data, split, len(model.config.labels)))
    return {"split": split, **accuracy_facts(found), "checkpoint": load_facts(checkpoint / WEIGHTS)}


def add_recall(commands: Commands) -> None:
    parser = add_command(commands, "recall", measure_recall, "how long a model that chats keeps an instruction")
    add_checkpoint(parser)
    parser.add_argument("--turns", type=int, nargs="+", default=list(TURNS), help="after so many it is checked")
    parser.add_argument(
        "--dialogues", type=int, default=NUM_DIALOGUES, help="of each kind of instruction and each length"
    )
    parser.add_argument("--seed", type=int, default=SEED, help="of the dialogues")
    parser.add_argument("--json", type=Path, help="also write the counts to this file")


def measure_recall(arguments: argparse.Namespace) -> None:
    if min(*arguments.turns, arguments.dialogues) < 1:
        raise ValueError("turns and dialogues must be at least 1")
    report = recall_report(arguments.checkpoint, arguments.turns, arguments.dialogues, arguments.seed)
    for turn, kinds in report["turns"].items():
        print(f"turn {turn}: " + ", ".join(f"{name} {one['kept']} of {one['total']}" for name, one in kinds.items()))
    if arguments.json is not None:
        write_json(arguments.json, report)


def recall_report(checkpoint: Path, turns: Sequence[int], num_dialogues: int, seed: int) -> dict[str, Any]:
    model, tokenizer = load_model(checkpoint)
    if not isinstance(model, CausalModel):
        raise ValueError(f"{checkpoint} does not chat")
    with one_thread():
        counts = recall(greedy_answers(model, tokenizer), turns, num_dialogues, seed)
    return {"seed": seed, "checkpoint": load_facts(checkpoint / WEIGHTS), "turns": counts}


def add_zoo(commands: Commands) -> None:
    text = "train and score every system, one after another; run it again to resume"
    parser = add_command(commands, "zoo", train_zoo, text)
    folders = " and ".join(sorted({system.corpus.folder for system in SYSTEMS.values()} - {""}))
    parser.add_argument("data", type=Path, help=f"folder with the folders {folders}")
    parser.add_argument("--runs", type=Path, default=Path("runs/zoo"), help="a folder for each run is made in it")
    parser.add_argument("--systems", nargs="*", choices=PLAN, default=list(PLAN), metavar="NAME", help="only these")
    parser.add_argument("--seeds", type=int, help="so many of each instead of as many as are planned")
    parser.add_argument("--precision", choices=PRECISIONS, default="float32", help="of runs that are not yet begun")


def train_zoo(arguments: argparse.Namespace) -> None:
    """Seed 1 of every system comes before seed 2 of any."""
    if arguments.seeds is not None and arguments.seeds < 1:
        raise ValueError(f"seeds is {arguments.seeds}, it must be at least 1")
    runs = [(seed, name) for name in arguments.systems for seed in range(1, 1 + (arguments.seeds or PLAN[name].seeds))]
    for seed, name in sorted(runs, key=lambda one: one[0]):
        print(f"{name}, seed {seed}", flush=True)
        system = SYSTEMS[name]
        run, data = arguments.runs / f"{name}-{seed}", arguments.data / system.corpus.folder
        settings = {**system.training, "max_epochs": PLAN[name].max_epochs, "seed": seed}
        train_and_score(system, TrainConfig(**settings, precision=_precision(run, arguments.precision)), data, run)


def _precision(run: Path, wanted: Precision) -> Precision:
    """A run ends as it began."""
    return read_train_config(run / "train.json").precision if (run / "state.safetensors").exists() else wanted


def train_and_score(system: System, config: TrainConfig, data: Path, run: Path) -> None:
    """Finish a run, then write `scores.json` into it; a run that has one is left as it is."""
    path = run / "scores.json"
    if path.exists():
        return
    Trainer(run, config, system.task, data, system.make_config).fit()
    checkpoint = run / "averaged"
    if system.task is TRANSLATION:
        _, report = evaluated(checkpoint, data, TEST_SPLIT, config.source, config.target)
    elif system.task is CLASSIFICATION:
        report = accuracy_report(checkpoint, data, system.task.validation_split)
    else:
        report = recall_report(checkpoint, TURNS, NUM_DIALOGUES, SEED)
    write_json(path, report)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m model", description="Train and evaluate attention models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_train(commands)
    add_evaluate(commands)
    add_accuracy(commands)
    add_recall(commands)
    add_zoo(commands)
    arguments = parser.parse_args()
    try:
        arguments.action(arguments)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        message = str(error).splitlines()[0]
        print(f"error: out of memory, use a smaller model or fewer batch_tokens: {message}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "error: interrupted; what a run has finished is kept, the same command goes on from there", file=sys.stderr
        )
        return 130
    return 0


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell PyTorch's allocation failures apart; on a CPU they have no class of their own."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


if __name__ == "__main__":
    sys.exit(main())
