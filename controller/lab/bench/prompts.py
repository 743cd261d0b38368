"""Made-up questions for measurements that need new prompts of the usual length."""

from typing import Final

import numpy as np

_SUBJECTS: Final = (
    "a second-order differential equation|the harmonic oscillator|a rotating frame of reference",
    "the French Revolution|the fall of Constantinople|the silk trade of the Middle Ages",
    "mitochondria in muscle cells|protein folding|gene expression in yeast",
    "a contract without consideration|the duty of care|the burden of proof",
    "supply and demand for wheat|inflation after a war|a central bank's interest rate",
    "a red-black tree|a deadlock between two threads|the travelling salesman problem",
    "covalent bonds in benzene|acid and base titration|the entropy of mixing",
    "memory in early childhood|classical conditioning|a patient with anxiety",
    "the categorical imperative|free will and determinism|utilitarian ethics",
    "tectonic plates under the Pacific|glacial erosion|monsoon winds over India",
    "the sonnets of Shakespeare|magic realism in novels|the voice of an unreliable narrator",
    "a suspension bridge in strong wind|fatigue cracks in steel|a heat exchanger",
)
_TASKS: Final = (
    "Explain {} to a student who has heard of it once, and give one everyday example that shows "
    "why it matters and where a first guess about it goes wrong.",
    "Which of these statements about {} is correct: it is always conserved, it depends on the "
    "observer, it was first described in the last century, or none of them?",
    "Write a short summary of {} in three sentences, then list two open questions that "
    "researchers still argue about and say which one you would study first.",
    "A colleague claims that {} can be understood without any mathematics at all; say whether you "
    "agree, and defend the answer with one argument and one counterexample.",
    "Compare {} with {}, name one thing they share and one in which they differ, and tell how an "
    "expert would notice the difference in practice.",
)


def made_up_prompts(count: int, rng: np.random.Generator) -> list[str]:
    """Questions of about 40 tokens about a dozen fields; a few may be alike."""
    subjects = [subject for field in _SUBJECTS for subject in field.split("|")]
    prompts: list[str] = []
    for number in range(count):
        first, second = rng.choice(len(subjects), 2, replace=False)
        task = _TASKS[int(rng.integers(len(_TASKS)))]
        text = task.format(subjects[first], subjects[second])
        prompts.append(f"{text} (case {number + int(rng.integers(10_000))})")
    return prompts
