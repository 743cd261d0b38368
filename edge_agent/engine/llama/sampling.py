"""How the child picks each token: llama.cpp's samplers, and a grammar beside them.

Imported in the child only.
"""

import ctypes
import random
import time
from typing import Any, Final

import llama_cpp
import numpy as np

from edge_agent.engine.base import RejectedError, RejectionKind, Sampling

_SEED_MASK: Final = 0xFFFF_FFFF
_IMPOSSIBLE: Final = float("-inf")
# A grammar that takes longer over one token holds up everybody else's answer.
_MOST_GRAMMAR_SECONDS: Final = 5.0


class AnswerSampler:
    """One answer's sampler: llama.cpp's chain, and a grammar beside it when there is one.

    The grammar is asked about the token that the chain chose, and about the whole vocabulary only
    when it forbids that one: with a large vocabulary that takes as long as decoding does.
    """

    def __init__(self, sampling: Sampling, vocabulary_tokens: int, grammar: Any) -> None:
        """Make a sampler.

        Args:
            sampling: how the answer is sampled; temperature 0 takes the most likely token.
            vocabulary_tokens: V, the length of a row of logits.
            grammar: llama.cpp's sampler, which this one takes over; None for free text.
        """
        self._chain = _chain_of(sampling)
        self._is_greedy = sampling.temperature == 0
        self._vocabulary_tokens = vocabulary_tokens
        self._grammar = grammar
        self._is_stuck = False
        if grammar is None:
            return
        self._one: Any = llama_cpp.llama_token_data()
        self._only = llama_cpp.llama_token_data_array(ctypes.pointer(self._one), 1, -1, False)
        self._greedy = llama_cpp.llama_sampler_init_greedy()
        # llama.cpp keeps bare pointers to all of these.
        self._interface = llama_cpp.llama_sampler_i()
        self._interface.apply = llama_cpp.llama_sampler_i_apply(self._apply)
        self._both = llama_cpp.llama_sampler()
        self._both.iface = ctypes.pointer(self._interface)

    def free(self) -> None:
        """Give llama.cpp's samplers back; nothing can be sampled any more."""
        llama_cpp.llama_sampler_free(self._chain)
        if self._grammar is not None:
            llama_cpp.llama_sampler_free(self._grammar)
            llama_cpp.llama_sampler_free(self._greedy)

    def sample(self, context: Any, batch_index: int) -> int:
        """The next token; RejectedError when the grammar allows none, or takes too long."""
        if self._is_greedy:
            token = _most_likely(context, batch_index, self._vocabulary_tokens)
        else:
            token = int(llama_cpp.llama_sampler_sample(self._chain, context, batch_index))
        if self._grammar is None:
            return token
        started_at = time.monotonic()
        self._one.id, self._one.logit = token, 1.0
        llama_cpp.llama_sampler_apply(self._grammar, ctypes.byref(self._only))
        if self._one.logit == _IMPOSSIBLE:
            both = ctypes.pointer(self._both)
            token = int(llama_cpp.llama_sampler_sample(both, context, batch_index))
            if self._is_stuck:
                raise RejectedError(
                    RejectionKind.INVALID_REQUEST,
                    "The grammar has come to a point where no token of this model can follow.",
                )
        llama_cpp.llama_sampler_accept(self._grammar, token)
        if time.monotonic() - started_at > _MOST_GRAMMAR_SECONDS:
            raise RejectedError(
                RejectionKind.INVALID_REQUEST,
                "The grammar takes too long for each token; make it less ambiguous.",
            )
        return token

    def _apply(self, _sampler: Any, candidates: Any) -> None:
        """Choose among what the grammar allows; called by llama.cpp with the whole vocabulary."""
        llama_cpp.llama_sampler_apply(self._grammar, candidates)
        llama_cpp.llama_sampler_apply(self._greedy, candidates)
        found = candidates.contents
        self._is_stuck = found.data[found.selected].logit == _IMPOSSIBLE
        if not self._is_stuck:
            found.selected = -1
            llama_cpp.llama_sampler_apply(self._chain, candidates)


def _chain_of(sampling: Sampling) -> Any:
    """llama.cpp's samplers, in the order in which they are applied."""
    parameters = llama_cpp.llama_sampler_chain_default_params()
    parameters.no_perf = True
    chain = llama_cpp.llama_sampler_chain_init(parameters)
    if sampling.temperature == 0:
        steps = [llama_cpp.llama_sampler_init_greedy()]
    else:
        steps = [
            llama_cpp.llama_sampler_init_top_k(sampling.top_k),
            llama_cpp.llama_sampler_init_top_p(sampling.top_p, 1),
            llama_cpp.llama_sampler_init_temp(sampling.temperature),
            llama_cpp.llama_sampler_init_dist(_seed_of(sampling.seed)),
        ]
    for step in steps:
        llama_cpp.llama_sampler_chain_add(chain, step)
    return chain


def _most_likely(context: Any, batch_index: int, vocabulary_tokens: int) -> int:
    """The first token with the largest logit, as llama.cpp's greedy sampler has it.

    That one first copies a row of logits into an array of candidates, which with 262,144 tokens
    took 0.4 ms of a step for each sequence.
    """
    row = llama_cpp.llama_get_logits_ith(context, batch_index)
    logits = (ctypes.c_float * vocabulary_tokens).from_address(ctypes.addressof(row.contents))
    return int(np.frombuffer(memoryview(logits), np.float32).argmax())


def _seed_of(seed: int | None) -> int:
    """Fold a seed of 64 bits into llama.cpp's 32; None draws one."""
    if seed is None:
        seed = random.SystemRandom().getrandbits(64)
    folded = (seed ^ (seed >> 32)) & _SEED_MASK
    # llama.cpp takes all ones for "draw one yourself".
    return folded - 1 if folded == llama_cpp.LLAMA_DEFAULT_SEED else folded
