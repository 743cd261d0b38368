"""Bursts of requests to judge predictions by: short and long prompts, short and long answers."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from controller.lab.demo.questions import QUESTIONS
from controller.lab.offline.questions import Question
from pointsman.v1 import types_pb2

_MOST_REQUESTS: Final = 8
_LIMITS: Final = (16, 32, 48, 96)
"""Greatest answer lengths of the built-in workload, in turn at random."""

_LONGEST_PROMPT_QUESTIONS: Final = 12
_FOLLOWED_EVERY: Final = 3


@dataclass(frozen=True, slots=True)
class Round:
    """A burst that is sent at once, and one that meets it still at work; often empty."""

    burst: tuple[types_pb2.InferenceRequest, ...]
    follower: tuple[types_pb2.InferenceRequest, ...] = ()


def built_in_rounds(rounds: int, seed: int) -> list[Round]:
    """Of the demonstration's questions, several of which often make one prompt."""
    rng = np.random.default_rng(seed)

    def burst(requests: int) -> tuple[types_pb2.InferenceRequest, ...]:
        made = []
        for _ in range(requests):
            many = round(math.exp(rng.uniform(0.0, math.log(_LONGEST_PROMPT_QUESTIONS))))
            chosen = rng.choice(len(QUESTIONS), size=many, replace=False)
            text = " ".join(QUESTIONS[int(index)].text for index in chosen)
            made.append(_request([("user", text)], int(rng.choice(_LIMITS))))
        return tuple(made)

    return [Round(*map(burst, sizes)) for sizes in _sizes(rounds, seed)]


def question_rounds(
    questions: Sequence[Question], rounds: int, seed: int, max_tokens: int
) -> list[Round]:
    """Of published questions; none comes again before all have come.

    Args:
        questions: at least one.
        rounds: how many.
        seed: the same one gives the same rounds.
        max_tokens: longest answer of a question that gives no length itself.
    """
    rng = random.Random(seed)
    drawn: list[Question] = []

    def burst(requests: int) -> tuple[types_pb2.InferenceRequest, ...]:
        made = []
        for _ in range(requests):
            if not drawn:
                drawn.extend(rng.sample(list(questions), len(questions)))
            question = drawn.pop()
            turns = [(message.role, message.content) for message in question.messages]
            made.append(_request(turns, question.max_tokens or max_tokens))
        return tuple(made)

    return [Round(*map(burst, sizes)) for sizes in _sizes(rounds, seed)]


def _sizes(rounds: int, seed: int) -> list[tuple[int, int]]:
    """Requests in each round's burst, and in the one that follows it."""
    rng = random.Random(seed)
    return [
        (
            rng.randint(1, _MOST_REQUESTS),
            rng.randint(1, _MOST_REQUESTS) if (index + 1) % _FOLLOWED_EVERY == 0 else 0,
        )
        for index in range(rounds)
    ]


def _request(turns: Sequence[tuple[str, str]], max_tokens: int) -> types_pb2.InferenceRequest:
    return types_pb2.InferenceRequest(
        chat=types_pb2.Chat(
            messages=[types_pb2.ChatMessage(role=role, content=text) for role, text in turns]
        ),
        sampling=types_pb2.SamplingParameters(max_tokens=max_tokens, temperature=0.0),
    )
