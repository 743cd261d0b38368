"""Whether llama.cpp's build suits this machine (pure)."""

import re
from dataclasses import dataclass
from typing import Final

_FEATURES: Final = {
    # llama.cpp's name -> what /proc/cpuinfo calls it, on x86 or on Arm; any of them will do.
    "SSE3": ("pni", "sse3"),
    "SSSE3": ("ssse3",),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX_VNNI": ("avx_vnni",),
    "AVX512": ("avx512f",),
    "AVX512_VBMI": ("avx512_vbmi", "avx512vbmi"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_INT8": ("amx_int8",),
    "NEON": ("asimd", "neon"),
    "ARM_FMA": ("asimd", "vfpv4"),
    "FP16_VA": ("asimdhp",),
    "DOTPROD": ("asimddp",),
    "MATMUL_INT8": ("i8mm",),
    "SVE": ("sve",),
    "SME": ("sme",),
}

_WORTH_HAVING: Final = ("AVX2", "FMA", "DOTPROD", "FP16_VA", "MATMUL_INT8")
"""Without one of these, a build is a good deal slower than it need be."""


@dataclass(frozen=True, slots=True)
class BuildFit:
    """How a build and a processor go together.

    Attributes:
        lacking: used by the build, and absent from the processor: an illegal instruction.
        unused: in the processor, worth having, and not used.
    """

    lacking: tuple[str, ...]
    unused: tuple[str, ...]


def compare_features(system_info: str, cpuinfo: str) -> BuildFit:
    """Lay llama.cpp's own line of features beside /proc/cpuinfo's.

    Args:
        system_info: of `llama_print_system_info`, such as "CPU : AVX = 1 | AVX2 = 0 | ".
        cpuinfo: the text of the file; "" where there is none, which finds nothing lacking.
    """
    told = re.findall(r"(\w+) = (\d+)", system_info)
    built = {name for name, value in told if int(value) and name in _FEATURES}
    lines = re.findall(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    if not lines or not told:
        return BuildFit((), ())
    has = set(lines[0].split())
    there = {name for name, flags in _FEATURES.items() if has & set(flags)}
    return BuildFit(
        tuple(sorted(built - there)),
        tuple(name for name in _WORTH_HAVING if name in there and name not in built),
    )


def maps_gpu_memory_virtually(system_info: str) -> bool:
    """Whether it is a CUDA build that takes GPU memory by CUDA's virtual memory management.

    On Jetson Orin such builds have been refused memory that was free
    (https://github.com/ggml-org/llama.cpp/issues/4680); GGML_CUDA_NO_VMM leaves it out.
    """
    cuda = re.search(r"CUDA : ([^:]*)", system_info)
    return cuda is not None and re.search(r"\bNO_VMM = 1\b", cuda[1]) is None
