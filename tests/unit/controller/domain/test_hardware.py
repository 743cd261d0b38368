import pytest

from controller.domain.hardware import (
    DeviceClass,
    ModelConfiguration,
    architecture,
    configuration_of,
    quantisation_bits,
)


def test_a_configuration_has_names_and_a_size():
    model = ModelConfiguration("gemma3", 0.27, 4)
    assert (model.scale_name, model.name) == ("gemma3-0.27b", "gemma3-0.27b-z4")
    assert model.weight_bytes == 0.135e9


def test_architectures_are_found_by_family_and_scale():
    assert architecture("gemma3", 0.268) == (18, 4)
    assert architecture("Gemma-3", 0.268) == (18, 4)
    assert architecture("gpt-oss", 20.9) == (24, 64)
    assert architecture("gemma3", 4.0) is None
    assert architecture("unheard-of", 1.0) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: ModelConfiguration("x", 0.0, 4),
        lambda: ModelConfiguration("x", float("nan"), 4),
        lambda: ModelConfiguration("x", 1.0, 0),
        lambda: DeviceClass("x", 0, 1),
        lambda: DeviceClass("x", 1, 1, cpu_share_ratio=0.0),
        lambda: DeviceClass("x", 1, 1, cpu_share_ratio=1.5),
    ],
)
def test_impossible_hardware_is_refused(make):
    with pytest.raises(ValueError, match="x: "):
        make()


def test_a_device_with_accelerator_cores_has_one():
    assert DeviceClass("x", 4, 1, 128).has_accelerator
    assert not DeviceClass("x", 4, 1).has_accelerator


@pytest.mark.parametrize(
    ("name", "bits"),
    [("Q4_K_M", 4), ("IQ3_XXS", 3), ("F16", 16), ("BF16", 16), ("q8_0", 8), ("Q2_K", 2)],
)
def test_bits_are_read_from_the_quantisations_name(name, bits):
    assert quantisation_bits(name) == bits


def test_an_unknown_quantisation_is_told():
    with pytest.raises(ValueError, match="unknown"):
        quantisation_bits("MXFP")


def test_a_catalogues_description_becomes_a_configuration():
    assert configuration_of("smollm2", 0.135, "Q8_0") == ModelConfiguration(
        "smollm2", 0.135, 8, 30, 9
    )
    assert configuration_of("mine", 3.0, "Q5_K_S") == ModelConfiguration("mine", 3.0, 5)


@pytest.mark.parametrize(("billions", "quantisation"), [(0.0, "Q4_0"), (1.0, "MXFP"), (1.0, "")])
def test_a_model_without_scale_or_quantisation_has_no_configuration(billions, quantisation):
    assert configuration_of("mine", billions, quantisation) is None
