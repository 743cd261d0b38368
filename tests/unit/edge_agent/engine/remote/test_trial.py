"""What one short request tells of an endpoint's speed."""

import pytest

from edge_agent.engine.base import Finished, StopReason
from edge_agent.engine.remote.trial import trial_rates


def account(prefill: float, decode: float, tokens: int) -> Finished:
    return Finished(
        reason=StopReason.STOP,
        prompt_tokens=200,
        completion_tokens=tokens,
        queue_seconds=0.0,
        prefill_seconds=prefill,
        decode_seconds=decode,
        work_seconds=prefill + decode,
    )


def test_an_answer_in_pieces_tells_both_rates() -> None:
    rates = trial_rates(account(prefill=0.5, decode=0.04, tokens=5))
    assert rates.prefill == pytest.approx(400.0)
    assert rates.decode == pytest.approx(100.0)  # the first token belongs to the prompt


@pytest.mark.parametrize(("decode", "tokens"), [(0.0, 5), (0.02, 5), (0.5, 1)])
def test_an_answer_in_one_piece_tells_only_what_the_whole_took(decode: float, tokens: int) -> None:
    rates = trial_rates(account(prefill=0.5, decode=decode, tokens=tokens))
    assert rates.decode == pytest.approx(tokens / (0.5 + decode))


def test_an_answer_in_no_time_tells_rates_that_are_finite() -> None:
    rates = trial_rates(account(prefill=0.0, decode=0.0, tokens=5))
    assert rates.prefill is not None
    assert rates.decode is not None
    assert 0.0 < rates.prefill < float("inf")
    assert 0.0 < rates.decode < float("inf")
