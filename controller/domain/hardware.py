"""What decides how fast a model runs: its configuration, and the class of the device."""

import re
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ModelConfiguration:
    """One deployable model (f, p, z) of DRLM: family, scale and quantisation.

    Attributes:
        family: lower case without spaces: "llama3.2", "gemma3", "gpt-oss".
        billions: parameters, in billions; above 0.
        quantisation_bits: nominal bits of a weight, 2 to 32; 16 is not quantised.
        layers: transformer blocks; None when unknown.
        heads: attention heads of a block; None when unknown.
    """

    family: str
    billions: float
    quantisation_bits: int
    layers: int | None = None
    heads: int | None = None

    def __post_init__(self) -> None:
        if not self.billions > 0:
            raise ValueError(f"{self.family}: {self.billions} billion parameters; give its scale")
        if not 1 <= self.quantisation_bits <= 32:
            raise ValueError(f"{self.family}: {self.quantisation_bits} bits a weight, not 1 to 32")

    @property
    def scale_name(self) -> str:
        """Family and scale, which DRLM's first head chooses: "gemma3-0.27b"."""
        return f"{self.family}-{self.billions:g}b"

    @property
    def name(self) -> str:
        """The whole configuration: "gemma3-0.27b-z4"."""
        return f"{self.scale_name}-z{self.quantisation_bits}"

    @property
    def weight_bytes(self) -> float:
        """Nominal size of the weights; a file is a tenth larger, for scales and embeddings."""
        return self.billions * 1e9 * self.quantisation_bits / 8.0


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Machines that are alike in what matters to speed.

    Attributes:
        kind: short name: "RP", "NJN", "JON", "JOA", "VM", or what a fleet calls its boards.
        cores: CPU cores, or as many threads as the engine may use; above 0.
        memory_bytes: of the machine; above 0.
        accelerator_cores: of a graphics processor that the engine uses; 0: it runs on the CPU.
        cpu_share_ratio: part of the CPU's time that the engine may use, above 0 to 1.
    """

    kind: str
    cores: int
    memory_bytes: int
    accelerator_cores: int = 0
    cpu_share_ratio: float = 1.0

    def __post_init__(self) -> None:
        if self.cores < 1 or self.memory_bytes < 1 or self.accelerator_cores < 0:
            raise ValueError(
                f"{self.kind}: cores and memory must be above 0, accelerator 0 or more"
            )
        if not 0.0 < self.cpu_share_ratio <= 1.0:
            raise ValueError(f"{self.kind}: CPU share {self.cpu_share_ratio}, not above 0 to 1")

    @property
    def has_accelerator(self) -> bool:
        """Whether a graphics processor decodes."""
        return self.accelerator_cores > 0


def device_class(kind: str, cores: int, memory_bytes: int, has_accelerator: bool) -> DeviceClass:
    """The class of a machine as its agent describes it, which says 0 for what it does not know."""
    return DeviceClass(kind, max(1, cores), max(1, memory_bytes), int(has_accelerator))


_ARCHITECTURES: Final[tuple[tuple[str, float, int, int], ...]] = (
    # Family, billions, layers, attention heads: as the models' published configurations have them.
    ("gpt-oss", 20.0, 24, 64),
    ("gemma2", 2.0, 26, 8),
    ("gemma3", 0.27, 18, 4),
    ("gemma3", 1.0, 26, 4),
    ("gemma3", 12.0, 48, 16),
    ("llama3.1", 8.0, 32, 32),
    ("llama3.2", 1.0, 16, 32),
    ("llama3.2", 3.0, 28, 24),
    ("qwen3", 0.6, 28, 16),
    ("qwen3", 1.7, 28, 16),
    ("tinyllama", 1.1, 22, 32),
    ("mistral", 7.0, 32, 32),
    ("smollm2", 0.135, 30, 9),
    ("qwen2.5", 0.5, 24, 14),
)


_BITS: Final = re.compile(r"I?Q(\d+)|[BF]F?(16|32)", re.IGNORECASE)


def architecture(family: str, billions: float) -> tuple[int, int] | None:
    """(layers, heads) of a published model whose scale is within a tenth; None when unknown.

    "gemma-3" is "gemma3": catalogues and papers differ in such signs.
    """
    wanted = _plain(family)
    for known, scale, layers, heads in _ARCHITECTURES:
        if _plain(known) == wanted and abs(billions - scale) <= 0.1 * scale:
            return layers, heads
    return None


def quantisation_bits(text: str) -> int:
    """Nominal bits of a GGUF quantisation: Q4_K_M 4, IQ3_XXS 3, F16 and BF16 16.

    Raises:
        ValueError: the name tells none.
    """
    found = _BITS.search(text)
    if found is None:
        raise ValueError(f"quantisation {text!r} is unknown; expected such as Q4_K_M or F16")
    return int(found.group(1) or found.group(2))


def configuration_of(family: str, billions: float, quantisation: str) -> ModelConfiguration | None:
    """The configuration of a model as catalogues describe it; None when that does not suffice."""
    if not billions > 0:
        return None
    try:
        bits = quantisation_bits(quantisation)
    except ValueError:
        return None
    layers, heads = architecture(family, billions) or (None, None)
    return ModelConfiguration(family, billions, bits, layers, heads)


def _plain(family: str) -> str:
    return "".join(sign for sign in family.lower() if sign.isalnum() or sign == ".")
