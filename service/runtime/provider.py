"""Which of ONNX Runtime's providers runs the graphs, and how their sessions are made."""

import functools
import os
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime

from service.bundle import Graph

Provider = Literal["cpu", "cuda"]

_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
_ERROR = 3  # of ONNX Runtime's levels of severity


class RuntimeUnavailableError(Exception):
    """The provider that was asked for cannot be used; the message says why."""


def choose_provider(wanted: Literal["auto", "cpu", "cuda"]) -> Provider:
    """CUDA where it is asked for, or works and is left to us.

    Raises:
        RuntimeUnavailableError: "cuda" is asked for, and the installed package does not offer it or cannot use it.
    """
    if wanted == "cpu":
        return "cpu"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        if wanted == "cuda":
            raise RuntimeUnavailableError("the installed onnxruntime has no CUDA provider; install the extra 'gpu'")
        return "cpu"
    try:
        _touch_cuda()
    except RuntimeError as error:
        if wanted == "cuda":
            raise RuntimeUnavailableError(f"CUDA cannot be used here: {_reason(error)}") from None
        return "cpu"
    return "cuda"


def _touch_cuda() -> None:
    """Raises RuntimeError where there is no device, no driver, or a library is missing.

    The package offers CUDA all the same then, and a session would say so on stderr and run on the CPU.
    """
    onnxruntime.set_default_logger_severity(_ERROR)  # its operators warn as they are loaded
    with redirect_stdout(StringIO()):  # it prints what it does not find
        onnxruntime.preload_dlls()  # CUDA's libraries may be Python packages, where the linker does not look
    onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)


def _reason(error: RuntimeError) -> str:
    """What CUDA itself says, where it says something, without the places in the source that it went through."""
    text = " ".join(str(error).split())
    _, failure, detail = text.rpartition("CUDA failure")
    return f"{failure}{detail.split(' ;')[0]}" if failure else text


def session_options(num_threads: int) -> Any:
    """For graphs whose shapes change from run to run; 0 threads leave their number to ONNX Runtime."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    # Shapes change with every step and batch: remembered patterns and their memory would only grow.
    options.enable_mem_pattern = False
    # Threads that spin after a run would take the core on which Python serves HTTP.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.log_severity_level = _ERROR  # warnings about the graph are the export's concern
    # Sessions take turns on one thread: with one arena, memory follows the largest run and not the sum over all graphs.
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


@functools.cache
def _register_shared_arena() -> None:
    """Register the arena of CPU memory that sessions with `session.use_env_allocators` share; once in a process."""
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    place = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, memory)
    onnxruntime.create_and_register_allocator(place, onnxruntime.OrtArenaCfg({}))


def load_session(folder: Path, graph: Graph, options: Any, provider: Provider) -> Any:
    """Load one graph of a bundle."""
    _register_shared_arena()
    path, providers = os.fspath(folder / graph.file), _PROVIDERS[provider]
    # The node that a sum and a LayerNormalization would become takes four times as long as the two, from 32 rows on.
    return onnxruntime.InferenceSession(path, options, providers, disabled_optimizers=["SkipLayerNormFusion"])


def load_if_there(folder: Path, graph: Graph | None, options: Any, provider: Provider) -> Any:
    """`load_session`, or None of a graph that a bundle lacks."""
    return None if graph is None else load_session(folder, graph, options, provider)
