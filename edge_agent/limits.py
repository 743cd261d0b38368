"""What a model may be asked to do, whoever asks: the settings, an order or the engine's caller."""

from typing import Final

MAX_SLOTS: Final = 256
"""What llama.cpp can decode at once (LLAMA_MAX_SEQ); a remote server is not asked for more."""

MAX_CONTEXT_TOKENS: Final = 1 << 20


def limit_problems(slots: int, context_tokens: int, least_context_tokens: int) -> list[str]:
    """What no engine could carry out, with the limits; empty when all is possible.

    Args:
        slots: sequences decoded at once.
        context_tokens: longest prompt plus answer of one sequence.
        least_context_tokens: 0 where 0 stands for the engine's own choice.
    """
    problems = []
    if not 1 <= slots <= MAX_SLOTS:
        problems.append(f"slots must be 1 to {MAX_SLOTS}, not {slots}")
    if not least_context_tokens <= context_tokens <= MAX_CONTEXT_TOKENS:
        problems.append(
            f"context_tokens must be {least_context_tokens} to {MAX_CONTEXT_TOKENS}, not "
            f"{context_tokens}"
        )
    return problems
