"""Run equality and export tests with each smaller instruction set of this processor.

Run it with `python -m tests.instruction_sets`. Rounding depends on the instruction set, because
kernels for wider registers sum in another order. Environment variables restrict PyTorch, MKL,
oneDNN and NumPy. ONNX Runtime has no such variable and always uses the best kernels of the
processor.
"""

import os
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import torch

FOLDERS = ("tests/equality", "tests/export")


@dataclass(frozen=True)
class InstructionSet:
    """x86 instruction set, and the values that restrict each library to it."""

    name: str
    capability: str  # as torch.backends.cpu.get_cpu_capability() reports it
    aten: str
    mkl: str
    onednn: str
    numpy: tuple[str, ...]  # the dispatched features that NumPy keeps

    def environment(self) -> dict[str, str]:
        # Features that this process has disabled stay disabled.
        found = os.environ.get("NPY_DISABLE_CPU_FEATURES", "").split()
        found += np.show_config(mode="dicts")["SIMD Extensions"].get("found", [])
        return {
            "ATEN_CPU_CAPABILITY": self.aten,
            "MKL_ENABLE_INSTRUCTIONS": self.mkl,
            "ONEDNN_MAX_CPU_ISA": self.onednn,
            "NPY_DISABLE_CPU_FEATURES": " ".join(feature for feature in found if feature not in self.numpy),
        }


# From the largest instruction set to the smallest.
SETS = (
    InstructionSet("AVX-512", "AVX512", "avx512", "AVX512", "AVX512_CORE", ("X86_V3", "X86_V4")),
    InstructionSet("AVX2", "AVX2", "avx2", "AVX2", "AVX2", ("X86_V3",)),
    InstructionSet("SSE4.2", "DEFAULT", "default", "SSE4_2", "SSE41", ()),
)


def lesser_sets(capability: str) -> tuple[InstructionSet, ...]:
    """Return the instruction sets below the one that PyTorch uses unless it is restricted."""
    names = [one.capability for one in SETS]
    return SETS[names.index(capability) + 1 :] if capability in names else ()


def main(arguments: list[str]) -> int:
    """Run pytest once for each instruction set, and return 1 if any of the runs fails."""
    own = torch.backends.cpu.get_cpu_capability()
    results = {}
    for one in lesser_sets(own):
        environment = one.environment()
        print(f"{one.name}:", *(f"{name}={value!r}" for name, value in environment.items()), flush=True)
        command = [sys.executable, "-m", "pytest", *(arguments or FOLDERS)]
        results[one.name] = subprocess.run(command, env=os.environ | environment, check=False).returncode
    outcomes = ", ".join(f"{name} {'passed' if code == 0 else 'FAILED'}" for name, code in results.items())
    print(f"PyTorch's own instruction set is {own}. Lesser ones: {outcomes or 'none on this processor'}.")
    return int(any(results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
