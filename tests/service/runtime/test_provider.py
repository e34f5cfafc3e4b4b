from collections.abc import Callable

import onnxruntime
import pytest

from sightline.service.runtime.provider import choose_provider
from sightline.service.runtime.runner import RuntimeUnavailableError

WITHOUT_LIBRARIES = "provider_bridge_ort.cc:2465\n CUDA Provider not available"  # message on a machine without a GPU
WITHOUT_DRIVER = (
    "cuda_call.cc:154 onnxruntime::CudaCall(ERRTYPE)\nCUDA failure 35: CUDA driver version is insufficient for "
    "CUDA runtime version ; GPU=-1 ; hostname=host ; file=cuda_provider_factory.cc"
)


def offer_cuda(monkeypatch: pytest.MonkeyPatch, allocate: Callable[..., object]) -> None:
    """Make CUDA available, as onnxruntime-gpu does on every machine."""
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    monkeypatch.setattr(onnxruntime.OrtValue, "ortvalue_from_shape_and_type", allocate)


def test_cuda_is_rejected_by_name_if_the_runtime_lacks_it() -> None:
    assert choose_provider("cpu") == "cpu"
    assert choose_provider("auto") == "cpu"
    with pytest.raises(RuntimeUnavailableError, match="'gpu'"):
        choose_provider("cuda")


def test_cuda_is_chosen_if_a_device_reports_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    offer_cuda(monkeypatch, lambda *_: object())
    assert choose_provider("auto") == "cuda"
    assert choose_provider("cuda") == "cuda"
    assert choose_provider("cpu") == "cpu"


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        (WITHOUT_LIBRARIES, "provider_bridge_ort.cc:2465 CUDA Provider not available"),
        (WITHOUT_DRIVER, "CUDA failure 35: CUDA driver version is insufficient for CUDA runtime version"),
    ],
)
def test_cuda_is_not_chosen_on_a_machine_without_a_device(
    says: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reject(*_: object) -> object:
        raise RuntimeError(says)

    offer_cuda(monkeypatch, reject)
    assert choose_provider("auto") == "cpu"
    with pytest.raises(RuntimeUnavailableError, match=rf"^CUDA cannot be used here: {reason}$"):
        choose_provider("cuda")
    assert not capsys.readouterr().out
