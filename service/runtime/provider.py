"""Choice of ONNX Runtime's execution provider, and creation of sessions."""

import functools
import os
import threading
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnxruntime

from sightline.base.bundle import Graph
from sightline.service.runtime.runner import RuntimeUnavailableError

Provider = Literal["cpu", "cuda"]

_PROVIDERS = {"cpu": ["CPUExecutionProvider"], "cuda": ["CUDAExecutionProvider", "CPUExecutionProvider"]}
_ERROR = 3  # severity level of ONNX Runtime
_REGISTRATION = threading.Lock()  # bundles are loaded in several threads, but share one arena


def choose_provider(requested: Literal["auto", "cpu", "cuda"]) -> Provider:
    """Return the provider to use; "auto" selects CUDA if it works, else the CPU.

    Raises `RuntimeUnavailableError` if "cuda" is requested, but cannot be used.
    """
    if requested == "cpu":
        return "cpu"
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        if requested == "cuda":
            raise RuntimeUnavailableError("the installed onnxruntime has no CUDA provider; install the extra 'gpu'")
        return "cpu"
    try:
        _check_cuda()
    except RuntimeError as error:
        if requested == "cuda":
            raise RuntimeUnavailableError(f"CUDA cannot be used here: {_reason(error)}") from None
        return "cpu"
    return "cuda"


def _check_cuda() -> None:
    """Raise `RuntimeError` if there is no device or driver, or a library is missing.

    ONNX Runtime lists the CUDA provider even if CUDA does not work; a session would then print a
    warning and run on the CPU.
    """
    onnxruntime.set_default_logger_severity(_ERROR)  # hides warnings while operators are loaded
    with redirect_stdout(StringIO()):  # missing libraries are printed
        onnxruntime.preload_dlls()  # finds CUDA libraries that are installed as Python packages
    onnxruntime.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", 0)


def _reason(error: RuntimeError) -> str:
    """Return the message of CUDA, if there is one, without source locations."""
    text = " ".join(str(error).split())
    _, failure, detail = text.rpartition("CUDA failure")
    return f"{failure}{detail.split(' ;')[0]}" if failure else text


def session_options(num_threads: int, *, prepack: bool = True) -> Any:
    """Return session options for graphs with dynamic shapes.

    If `num_threads` is 0, ONNX Runtime chooses it. `prepack` copies the weights of products in the
    order in which kernels read them. Otherwise they stay mapped from their file, and results may
    depend on the batch.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    # Shapes change with every step and batch, so cached memory patterns would only grow.
    options.enable_mem_pattern = False
    # A plan for the reuse of buffers with such shapes frees no memory, and takes two thirds of the
    # time in which a large graph opens.
    options.enable_mem_reuse = False
    # Threads that spin after a run would compete with the HTTP server for CPU cores.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if not prepack:
        options.add_session_config_entry("session.disable_prepacking", "1")
    options.log_severity_level = _ERROR  # the export checks warnings about graphs
    # Sessions run one after another. With a shared arena, memory depends on the largest run instead
    # of the sum over all graphs.
    options.add_session_config_entry("session.use_env_allocators", "1")
    return options


def run_options() -> Any:
    """Return options for the runs of a session."""
    options = onnxruntime.RunOptions()
    # Without this entry, the Python part of ONNX Runtime raises and catches an exception for each
    # run with an I/O binding, which takes 30 microseconds. The value stands for no CUDA graph.
    options.add_run_config_entry("gpu_graph_id", "-1")
    return options


@functools.cache
def _register_shared_arena() -> None:
    """Register the CPU memory arena that all sessions of the process share."""
    kind, memory = onnxruntime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, onnxruntime.OrtMemType.DEFAULT
    memory_info = onnxruntime.OrtMemoryInfo("Cpu", kind, 0, memory)
    onnxruntime.create_and_register_allocator(memory_info, onnxruntime.OrtArenaCfg({}))


def load_session(folder: Path, graph: Graph, options: Any, provider: Provider) -> Any:
    with _REGISTRATION:
        _register_shared_arena()
    path, providers = os.fspath(folder / graph.file), _PROVIDERS[provider]
    # From 32 rows on, the fused node takes four times as long as the separate ones.
    return onnxruntime.InferenceSession(path, options, providers, disabled_optimizers=["SkipLayerNormFusion"])


def load_optional_session(folder: Path, graph: Graph | None, options: Any, provider: Provider) -> Any:
    """Load one graph of a bundle, or return None if the bundle does not have it."""
    return None if graph is None else load_session(folder, graph, options, provider)
