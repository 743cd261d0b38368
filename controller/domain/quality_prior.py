"""Expected quality of a model nobody has profiled yet.

Ours, since neither paper has one: larger models answer better, with diminishing returns, and
coarse quantisation costs a little. It only has to rank models sensibly until observations
replace it, and every estimate that comes from it is marked "prior".
"""

import math
import re

_LOW, _HIGH = 0.20, 0.90
"""Chance level of mixed question sets, and what no local model reaches without being measured."""

_MIDPOINT_BILLIONS = 2.0
_STEEPNESS = 0.9
_PENALTY_BY_BITS = {1: 0.25, 2: 0.12, 3: 0.05, 4: 0.02, 5: 0.01}


def quality_prior(parameters_billions: float, quantisation: str, is_instruct: bool = True) -> float:
    """Expected share of right answers, 0 to 1.

    Args:
        parameters_billions: size of the model; 0 when unknown, which ranks it lowest.
        quantisation: such as "Q4_K_M"; unknown names cost nothing.
        is_instruct: False for a base model, which follows instructions less well.
    """
    # The logistic curve of log(parameters): 0 for none, 1/2 at the midpoint, towards 1 above.
    power = math.pow(max(parameters_billions, 0.0), _STEEPNESS)
    size = power / (power + math.pow(_MIDPOINT_BILLIONS, _STEEPNESS))
    bits = re.search(r"Q(\d)", quantisation.upper())
    penalty = _PENALTY_BY_BITS.get(int(bits.group(1)), 0.0) if bits else 0.0
    quality = _LOW + (_HIGH - _LOW) * size - penalty * (1.0 - _LOW)
    if not is_instruct:
        quality *= 0.85
    return min(max(quality, 0.05), 0.99)
