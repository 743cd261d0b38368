"""Prints the logits after some prompts, decoded each alone and then together."""

import array
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from edge_agent.engine.base import EngineSettings
from edge_agent.engine.llama.llama_cpp import LlamaModel
from edge_agent.engine.llama.worker import BatchToken


def logits_of(
    settings: EngineSettings, prompts: Sequence[Sequence[int]], *, together: bool
) -> list[list[float]]:
    """The logits after each prompt, decoded in one batch or each in a batch of its own.

    It shows that a sequence decoded among others comes out as it does alone. All but
    the last token of each prompt go in before, so that the last step is a decoding step like
    those of a running engine.

    Args:
        settings: with as many slots as there are prompts.
        prompts: P lists of tokens, at least two tokens each.

    Returns:
        float[P, V].
    """
    model = LlamaModel(settings)
    for slot, tokens in enumerate(prompts):
        model.decode(
            [BatchToken(token, at, slot, False) for at, token in enumerate(tokens[:-1])], None
        )
    last = [
        BatchToken(tokens[-1], len(tokens) - 1, slot, True) for slot, tokens in enumerate(prompts)
    ]
    if together:
        model.decode(last, None)
        return [model.logits(index) for index in range(len(last))]
    rows = []
    for item in last:
        model.decode([item], None)
        rows.append(model.logits(0))
    return rows


def main() -> None:
    """Print a line of hexadecimal floats for each prompt, alone first."""
    path, texts = Path(sys.argv[1]), json.loads(sys.argv[2])
    settings = EngineSettings(path, context_tokens=256, slots=len(texts), threads=2)
    model = LlamaModel(settings)
    prompts = [model.tokenise(text).tokens for text in texts]
    for together in (False, True):
        for row in logits_of(settings, prompts, together=together):
            print(array.array("f", row).tobytes().hex())  # noqa: T201  # what the test reads


if __name__ == "__main__":
    main()
