"""Fixtures of all test folders.

They import PyTorch lazily, because tests of the service run without it.
"""

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

# One thread for PyTorch and BLAS, also in the processes that tests start: tensors of tests are
# small, and threads that wait for each other take the cores from other tests.
os.environ["OMP_NUM_THREADS"] = "1"
# Many processes start, and read compiled modules even where the environment forbids to write them.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

SENTENCES = Path(__file__).parents[1] / "loadtest" / "sentences.txt"

# Training text of the toy tokenizer, and sentences for verifying the toy bundle.
TOY_SENTENCES = (
    "Two girls are playing with a small brown dog on the beach.",
    "A man sleeps.",
    "An old woman sells 25 flowers at the corner of a busy street.",
    "“Wait!” shouts Zoë, running after the bus.",
    "Several people wait in the rain for the last train to the city.",
    "A boy wearing a blue helmet rides his bicycle.",
)


# Files that take longest. They start first, so that no process runs one while the others are idle.
# Those that wait for processes alternate with those that compute.
LONGEST = (
    "tests/service/workers/test_workers.py",
    "tests/export/test_families.py",
    "tests/e2e/test_documented_commands.py",
    "tests/service/test_main.py",
    "tests/export/test_hostile.py",
    "tests/equality/test_transformers.py",
    "tests/commands/test_main.py",
    "tests/equality/test_recurrent_systems.py",
    "tests/e2e/test_schemathesis.py",
    "tests/equality/test_fine_tuned_served.py",
    "tests/e2e/test_translate_file.py",
    "tests/service/test_declared_errors.py",
    "tests/service/test_faults.py",
    "tests/service/http/test_protocol.py",
    "tests/model/architectures/test_pretrained.py",
    "tests/model/training/test_killed_runs.py",
    "tests/model/test_train_command.py",
    "tests/model/test_students.py",
    "tests/translation/test_documents.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return the number of processes of `-n auto`: one more than processors, because tests wait for
    servers and timeouts.
    """
    return len(os.sched_getaffinity(0)) + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while test files are imported, and never visit what they leave.

    Otherwise, garbage collection takes nearly half of the time of importing them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {file: rank for rank, file in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(LONGEST)))


@pytest.hookimpl(trylast=True)  # after the parameters of tests are known
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Fail the collection of a file that imports a fixture without those that the fixture needs.

    pytest looks only when a test runs, and `make test` runs no tests of proxies.
    """
    if missing := {*metafunc.fixturenames} - {*metafunc._arg2fixturedefs} - {"request"}:
        raise pytest.Collector.CollectError(f"{metafunc.definition.name}: there is no fixture {', '.join(missing)}")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Return a function that gives the same file system another size in KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"a file system of a given size cannot be mounted: {done.stderr.strip()}")

    if shutil.which("mount") is None:
        pytest.skip("a file system of a given size cannot be mounted: there is no program mount")
    mount("size=4k")

    def resize(kibibytes: int) -> Path:
        mount(f"remount,size={kibibytes}k")
        return disk

    yield resize
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Sentences of loadtest/sentences.txt."""
    return SENTENCES.read_text(encoding="utf-8").split("\n")[:-1]


@pytest.fixture(scope="session")
def toy_sentences() -> list[str]:
    return list(TOY_SENTENCES)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small Transformer with random weights whose greedy outputs depend on the source."""
    import torch

    from sightline.model.architectures.transformer import Transformer
    from sightline.model.checkpoint import save_checkpoint
    from sightline.model.config import TransformerConfig
    from sightline.model.data.tokenizer_training import train_tokenizer

    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained = train_tokenizer(TOY_SENTENCES, vocab_size=400)
    trained.save(str(tokenizer))
    config = TransformerConfig(
        trained.get_vocab_size(), d_model=32, num_heads=4, d_ff=64, encoder_layers=2, decoder_layers=2
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = Transformer(config)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(
                    0.1 * torch.randn_like(parameter)
                )  # norms and biases that do nothing would hide mistakes
        # With unchanged tied embeddings, a random model repeats the last token.
        model.embedding.weight *= 0.3
        model.embedding.weight[config.eos_id] *= 2
        model.decoder[-1].feed_forward_norm.norm.weight.normal_()  # type: ignore[union-attr, operator]
    save_checkpoint(folder, config, model.state_dict(), tokenizer, facts={})
    return folder


@pytest.fixture(scope="session")
def classifier_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small classifier with random weights and three labels."""
    import torch

    from sightline.model.architectures.classifier import Classifier
    from sightline.model.checkpoint import save_checkpoint
    from sightline.model.config import ClassifierConfig
    from sightline.model.data.tokenizer_training import train_tokenizer

    tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    trained = train_tokenizer(TOY_SENTENCES, vocab_size=400)
    trained.save(str(tokenizer))
    vocab_size = trained.get_vocab_size()
    config = ClassifierConfig(
        vocab_size, d_model=16, num_heads=2, d_ff=32, encoder_layers=2, labels=("bad", "fair", "good")
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(2)
        model = Classifier(config)
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("classifier")
    save_checkpoint(folder, config, model.state_dict(), tokenizer, facts={})
    return folder


@pytest.fixture(scope="session")
def bundle(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Verified bundle of the toy checkpoint; copy it before changing a file."""
    from sightline.base.bundle import Languages
    from sightline.export.options import BundleMetadata
    from tests.support.training_runs import export_bundle

    folder = tmp_path_factory.mktemp("bundles") / "toy"
    label = BundleMetadata("toy", "random weights", "Apache-2.0", Languages(sources=("en",), targets=("de",)))
    export_bundle(checkpoint, folder, label, TOY_SENTENCES[:3])
    return folder


@pytest.fixture(scope="session")
def classifier_bundle(classifier_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Verified bundle of the toy classifier; copy it before changing a file."""
    from sightline.export.options import BundleMetadata
    from tests.support.training_runs import export_bundle

    folder = tmp_path_factory.mktemp("classifiers") / "toy-classifier"
    export_bundle(classifier_checkpoint, folder, BundleMetadata("toy-classifier"), TOY_SENTENCES)
    return folder
