"""Builds beside processors."""

from edge_agent.build_fit import BuildFit, compare_features, maps_gpu_memory_virtually

PI_4 = "processor\t: 0\nFeatures\t: fp asimd evtstrm crc32 cpuid\n"
PI_5 = "processor\t: 0\nFeatures\t: fp asimd evtstrm fphp asimdhp asimddp\n"
PC = "processor\t: 0\nflags\t\t: fpu pni ssse3 avx avx2 fma f16c bmi2\n"


def test_build_for_a_pi_5_dies_on_a_pi_4() -> None:
    built = "CPU : NEON = 1 | ARM_FMA = 1 | FP16_VA = 1 | DOTPROD = 1 | REPACK = 1 | "
    assert compare_features(built, PI_4) == BuildFit(("DOTPROD", "FP16_VA"), ())
    assert compare_features(built, PI_5) == BuildFit((), ())


def test_portable_build_wastes_what_a_pi_5_has() -> None:
    fit = compare_features("CPU : NEON = 1 | ARM_FMA = 1 | DOTPROD = 0 | ", PI_5)
    assert fit == BuildFit((), ("DOTPROD", "FP16_VA"))


def test_build_with_avx512_dies_on_a_pc_without() -> None:
    fit = compare_features("CPU : SSE3 = 1 | AVX = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 1 | ", PC)
    assert fit.lacking == ("AVX512",)


def test_what_nobody_tells_is_no_finding() -> None:
    assert compare_features("", PC) == compare_features("CPU : AVX = 1", "") == BuildFit((), ())
    assert compare_features("CPU : AVX2 = 1 | NEWNESS = 1", PC).lacking == ()


CPU = "CPU : NEON = 1 | ARM_FMA = 1 | "
CUDA = "CUDA : ARCHS = 870 | USE_GRAPHS = 1 | PEER_MAX_BATCH_SIZE = 128 | "
CUDA_NO_VMM = "CUDA : ARCHS = 870 | NO_VMM = 1 | USE_GRAPHS = 1 | "


def test_cuda_build_with_virtual_memory_is_told_from_one_without() -> None:
    assert maps_gpu_memory_virtually(CUDA + CPU)
    assert not maps_gpu_memory_virtually(CUDA_NO_VMM + CPU)
    assert not maps_gpu_memory_virtually(CPU)
