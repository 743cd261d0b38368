import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.domain.quality_prior import quality_prior

sizes = st.floats(0.0, 1e6)
quantisations = st.sampled_from(["", "F16", "Q8_0", "Q6_K", "Q4_K_M", "IQ3_XXS", "Q2_K", "q4_0"])


@given(sizes, sizes, quantisations, st.booleans())
def test_larger_model_is_never_expected_to_be_worse(
    one: float, other: float, quantisation: str, is_instruct: bool
) -> None:
    small, large = sorted((one, other))
    assert quality_prior(small, quantisation, is_instruct) <= quality_prior(
        large, quantisation, is_instruct
    )


@given(sizes, st.booleans())
def test_coarser_quantisation_is_never_expected_to_be_better(
    size: float, is_instruct: bool
) -> None:
    by_bits = [quality_prior(size, f"Q{bits}_K", is_instruct) for bits in range(1, 9)]
    assert by_bits == sorted(by_bits)


@given(sizes, quantisations)
def test_prior_is_a_share_and_prefers_instruction_tuned_models(
    size: float, quantisation: str
) -> None:
    base, tuned = (quality_prior(size, quantisation, flag) for flag in (False, True))
    assert 0.0 < base <= tuned < 1.0


@pytest.mark.parametrize("name", ["Q4_K_M", "q4_k_m", "IQ4_XS", "UD-Q4_K_XL"])
def test_bits_are_found_in_the_usual_names(name: str) -> None:
    assert quality_prior(3.0, name) < quality_prior(3.0, "F16")


def test_demonstration_models_rank_as_one_would_expect() -> None:
    smol, gemma, eight = (quality_prior(size, "Q4_K_M") for size in (0.135, 0.27, 8.0))
    assert smol < gemma < eight
