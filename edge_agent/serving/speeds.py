"""The speeds of a loaded model: measured before under the same conditions, or measured now."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from edge_agent.engine.base import InferenceEngine, LoadedModel
from edge_agent.errors import EngineError, EngineFailure
from edge_agent.serving.calibrations import KeptCalibrations, Speeds
from edge_agent.serving.hosted import HostedModel
from edge_agent.serving.token_energy import TokenEnergy

_CALIBRATION_METHOD: Final = 3
"""Raised when speeds are measured in another way, so that kept ones are measured anew."""

_MEASURING_SECONDS: Final = 300.0

Calibrate = Callable[[InferenceEngine, int], Awaitable[Speeds]]
MeasureEnergy = Callable[[InferenceEngine, int], Awaitable[TokenEnergy | None]]


@dataclass(slots=True)
class SpeedMeter:
    """Knows or measures what a loaded engine can do.

    Attributes:
        kept: what was measured before.
        calibrate: measures a loaded engine with this many slots.
        measure_energy: joules of a token on a loaded local engine; None where nothing can tell.
        power_mode: the board's mode now; speeds hold for one mode.
    """

    kept: KeptCalibrations
    calibrate: Calibrate
    measure_energy: MeasureEnergy | None
    power_mode: Callable[[], str]

    async def speeds_of(
        self,
        model: HostedModel,
        engine: InferenceEngine,
        loaded: LoadedModel,
        is_fresh: bool = False,
    ) -> Speeds:
        """What was measured under the same conditions, else what is measured now, and then kept.

        Args:
            model: prepared.
            is_fresh: measure in any case.

        Raises:
            EngineError: it fails while it is measured, or takes too long.
        """
        declared = loaded.declared_rates
        if (
            declared.prefill is not None
            and declared.decode is not None
            and declared.saturated_decode is not None
        ):
            return Speeds(
                declared.prefill,
                declared.decode,
                declared.saturated_decode,
                engine_version=loaded.engine_version,
            )
        mode = self.power_mode() if model.spec.uses_this_machine else ""
        key = _conditions(model, loaded, mode)
        speeds = None if is_fresh else self.kept.find(key)
        if speeds is None:
            speeds = await self._measure(engine, loaded, mode)
            if model.spec.uses_this_machine:
                speeds = await self._with_energy(speeds, engine, loaded)
            self.kept.keep(key, speeds)
        return replace(
            speeds,
            prefill_tokens_per_second=declared.prefill or speeds.prefill_tokens_per_second,
            decode_tokens_per_second=declared.decode or speeds.decode_tokens_per_second,
            saturated_decode_tokens_per_second=declared.saturated_decode
            or speeds.saturated_decode_tokens_per_second,
        )

    def kept_for_now(self, model: HostedModel) -> Speeds | None:
        """What was measured of a local model in the power mode that the board has now."""
        if model.loaded is None:
            return None
        return self.kept.find(_conditions(model, model.loaded, self.power_mode()))

    def hold_now(self, model: HostedModel) -> bool:
        """Whether a model's speeds hold for the power mode that the board has now."""
        return (
            not model.spec.uses_this_machine
            or model.speeds is None
            or model.speeds.power_mode == self.power_mode()
        )

    async def _measure(self, engine: InferenceEngine, loaded: LoadedModel, mode: str) -> Speeds:
        try:
            speeds = await asyncio.wait_for(
                self.calibrate(engine, loaded.slots), _MEASURING_SECONDS
            )
        except asyncio.TimeoutError as error:
            raise EngineError(
                EngineFailure.STALLED,
                f"measuring its speed took longer than {_MEASURING_SECONDS:g} s",
            ) from error
        return replace(
            speeds,
            measured_slots=loaded.slots,
            engine_version=loaded.engine_version,
            power_mode=mode,
        )

    async def _with_energy(
        self, speeds: Speeds, engine: InferenceEngine, loaded: LoadedModel
    ) -> Speeds:
        energy = None
        if self.measure_energy is not None:
            energy = await self.measure_energy(engine, loaded.slots)
        if energy is None:
            return speeds
        return replace(
            speeds,
            load_watts=energy.load_watts,
            prefill_joules_per_token=energy.prefill_joules_per_token,
            decode_joules_per_token=energy.decode_joules_per_token,
        )


def _conditions(model: HostedModel, loaded: LoadedModel, power_mode: str) -> str:
    """All that a measured speed depends on."""
    assert model.prepared is not None
    conditions = [
        f"method={_CALIBRATION_METHOD}",
        model.prepared.digest,
        loaded.engine_version,
        f"slots={model.settings.slots}",
    ]
    conditions += model.spec.conditions(model.settings, model.prepared)
    if model.spec.uses_this_machine:
        conditions.append(f"power={power_mode}")
    return "/".join(conditions)
