"""The child's loop over a model that is a script: tokens are bytes, answers are given."""

from collections.abc import Callable, Sequence

import pytest

from edge_agent.engine.base import (
    Finished,
    FormatKind,
    GenerationRequest,
    Message,
    PrefixReuse,
    PromptProgress,
    RejectedError,
    RejectionKind,
    ResponseFormat,
    Sampling,
    StopReason,
    TextChunk,
)
from edge_agent.engine.llama.messages import Cancel, Generate, SlotGiven, Step, StepEvent
from edge_agent.engine.llama.worker import BatchToken, Inbox, Worker
from edge_agent.engine.prefixes import TokenisedPrompt

END = 256
SECONDS_PER_TOKEN = 0.001


class ScriptedModel:
    """Answers each slot with the bytes of `answers[first byte of its prompt]`, then the end.

    Keeps a cache like the real one and refuses what a real one would get wrong: a token at
    another position than the next.
    """

    batch_tokens = 64
    can_abort = True
    is_recurrent = False

    def __init__(self, answers: dict[str, bytes], slots: int) -> None:
        self.answers = answers
        self.caches: list[list[int]] = [[] for _ in range(slots)]
        self.samplers: dict[int, str | None] = {}
        self.swaps = 0
        self.batch: Sequence[BatchToken] = ()
        self.batch_sizes: list[int] = []
        self.now = 0.0
        self.during_decode: Callable[[], None] = lambda: None

    def clock(self) -> float:
        return self.now

    def tokenise(self, prompt: str | Sequence[Message]) -> TokenisedPrompt:
        """A raw prompt's part before "/" is its system prompt."""
        if not isinstance(prompt, str):
            raise RejectedError(RejectionKind.NO_CHAT_TEMPLATE, "no template")
        return TokenisedPrompt(list(prompt.encode()), prompt.find("/") + 1)

    def grammar(self, wanted: ResponseFormat) -> str:
        if "bad" in wanted.text:
            raise RejectedError(RejectionKind.INVALID_REQUEST, "a bad grammar")
        return wanted.text

    def decode(self, batch: Sequence[BatchToken], should_abort: Callable[[], bool] | None) -> bool:
        assert 0 < len(batch) <= self.batch_tokens
        self.batch_sizes.append(len(batch))
        self.now += SECONDS_PER_TOKEN * len(batch)
        for index, item in enumerate(batch):
            if index == len(batch) // 2:
                self.during_decode()
                if should_abort is not None and should_abort():
                    return False
            assert item.position == len(self.caches[item.slot])
            self.caches[item.slot].append(item.token)
        self.batch = batch
        return True

    def start_sampling(self, slot: int, sampling: Sampling, grammar: str | None) -> None:
        assert slot not in self.samplers
        self.samplers[slot] = grammar

    def stop_sampling(self, slot: int) -> None:
        del self.samplers[slot]

    def sample(self, slot: int, batch_index: int) -> int:
        item = self.batch[batch_index]
        assert item.slot == slot
        assert item.wants_logits
        if self.samplers[slot] == "stuck":
            raise RejectedError(RejectionKind.INVALID_REQUEST, "stuck")
        cache = bytes(self.caches[slot])
        prompt_length = cache.rindex(b"|") + 1
        answer = self.answers[chr(cache[0])]
        position = len(cache) - prompt_length
        return answer[position] if position < len(answer) else END

    def is_end(self, token: int) -> bool:
        return token == END

    def piece(self, token: int) -> bytes:
        return bytes([token])

    def truncate(self, slot: int, length: int) -> None:
        assert length <= len(self.caches[slot])
        assert not self.is_recurrent or length == 0
        del self.caches[slot][length:]

    def can_cut(self, slot: int, length: int) -> bool:
        assert 0 < length <= len(self.caches[slot])
        return not self.is_recurrent or length == len(self.caches[slot])

    def swap(self, one: int, other: int) -> None:
        self.swaps += 1
        caches = self.caches
        caches[one], caches[other] = caches[other], caches[one]
        places = {one: other, other: one}
        self.samplers = {places.get(slot, slot): held for slot, held in self.samplers.items()}


class Rig:
    """A worker, its model and what it sent."""

    def __init__(
        self,
        answers: dict[str, bytes],
        *,
        slots: int = 2,
        context_tokens: int = 200,
        cpu_share_ratio: float = 1.0,
        prefix_reuse: PrefixReuse = PrefixReuse.SYSTEM,
    ) -> None:
        self.model = ScriptedModel(answers, slots)
        self.inbox = Inbox(self.model.clock)
        self.steps: list[Step] = []
        self.worker = Worker(
            self.model,
            self.inbox,
            self.steps.append,
            slots=slots,
            context_tokens=context_tokens,
            cpu_share_ratio=cpu_share_ratio,
            prefix_reuse=prefix_reuse,
            clock=self.model.clock,
        )

    def ask(
        self,
        key: str,
        prompt: str,
        *,
        session_id: str = "",
        grammar: str | None = None,
        **sampling: object,
    ) -> None:
        fields: dict[str, object] = {"max_tokens": 100, **sampling}
        wanted = None if grammar is None else ResponseFormat(FormatKind.GRAMMAR, grammar)
        chosen = Sampling(**fields)  # type: ignore[arg-type]
        self.inbox.put(Generate(GenerationRequest(key, prompt, chosen, wanted, session_id)))

    def run(self) -> None:
        self.worker.step()
        for _ in range(1000):
            wait = self.worker.seconds_to_next_step()
            if wait is None:
                return
            self.model.now += wait
            self.worker.step()
        raise AssertionError("the worker does not come to an end")

    def events(self, key: str) -> list[StepEvent]:
        return [event for step in self.steps for name, event in step.events if name == key]

    def text(self, key: str) -> str:
        return "".join(e.text for e in self.events(key) if isinstance(e, TextChunk))

    def account(self, key: str) -> Finished:
        last = self.events(key)[-1]
        assert isinstance(last, Finished)
        return last


def test_an_answer_that_the_model_ends_stops() -> None:
    rig = Rig({"a": b"hello"})
    rig.ask("k", "a|")
    rig.run()
    assert rig.text("k") == "hello"
    account = rig.account("k")
    assert account.reason is StopReason.STOP
    assert account.prompt_tokens == 2
    assert account.completion_tokens == 6  # the token that ends it was decoded as well
    assert isinstance(rig.events("k")[0], SlotGiven)
    # What was decoded stays for whoever begins alike; the last token never was.
    assert [bytes(cache) for cache in rig.model.caches] == [b"a|hello", b""]
    assert rig.model.samplers == {}


def test_sequences_share_each_step() -> None:
    rig = Rig({"a": b"A" * 20, "b": b"B" * 20})
    rig.ask("one", "a|")
    rig.ask("two", "b|")
    rig.run()
    assert rig.text("one") == "A" * 20
    assert rig.text("two") == "B" * 20
    assert rig.model.batch_sizes.count(2) >= 19


def test_a_long_prompt_is_read_beside_the_answers_of_others() -> None:
    rig = Rig({"a": b"A" * 40, "b": b"B"})
    rig.ask("talker", "a|")
    rig.worker.step()
    rig.ask("reader", "b" + "x" * 150 + "|")
    rig.run()
    names = [name for step in rig.steps for name, event in step.events]
    first = names.index("reader")
    last = max(i for i, name in enumerate(names) if name == "reader")
    assert names[first:last].count("talker") >= 2
    progress = [e for e in rig.events("reader") if isinstance(e, PromptProgress)]
    assert [p.tokens_read for p in progress] == sorted({p.tokens_read for p in progress})
    assert progress[-1] == PromptProgress(152, 152)
    assert rig.text("talker") == "A" * 40


def test_prompts_that_end_go_before_a_long_one_but_not_for_ever() -> None:
    """R17: a short one comes with every step; its first token is there one step later."""
    rig = Rig({"a": b"A", "b": b"B"}, slots=2)
    rig.ask("long", "b" + "x" * 150 + "|")
    rig.worker.step()
    shorts = 0
    while not rig.text("long"):
        rig.ask(f"short-{shorts}", "a" + "x" * 20 + "|", max_tokens=1)
        rig.worker.step()
        assert rig.text(f"short-{shorts}") == "A"
        shorts += 1
        assert shorts < 20
    assert shorts > 4
    # Alone, or beside no more of the long one than it has itself, until that one ends too.
    assert max(rig.model.batch_sizes[1:shorts]) <= 2 * 22


def test_max_tokens_and_the_end_of_the_context_end_with_length() -> None:
    rig = Rig({"a": b"A" * 500}, context_tokens=50)
    rig.ask("limited", "a|", max_tokens=7)
    rig.ask("endless", "a|", max_tokens=400)
    rig.run()
    assert rig.text("limited") == "A" * 7
    assert rig.account("limited").reason is StopReason.LENGTH
    assert rig.account("endless").completion_tokens == 48
    assert rig.account("endless").reason is StopReason.LENGTH


def test_a_prompt_that_does_not_fit_is_rejected_before_anything_is_decoded() -> None:
    """P8."""
    rig = Rig({}, context_tokens=50)
    rig.ask("long", "a" * 50)
    rig.run()
    (error,) = rig.events("long")
    assert isinstance(error, RejectedError)
    assert error.kind is RejectionKind.CONTEXT_EXCEEDED
    assert rig.model.batch_sizes == []


def test_what_the_model_rejects_is_passed_on() -> None:
    rig = Rig({})
    rig.inbox.put(Generate(GenerationRequest("chat", (Message("user", "hi"),))))
    rig.run()
    (error,) = rig.events("chat")
    assert isinstance(error, RejectedError)
    assert error.kind is RejectionKind.NO_CHAT_TEMPLATE


def test_a_stop_string_ends_the_answer_before_it() -> None:
    rig = Rig({"a": b"one two STOP three"})
    rig.ask("k", "a|", stop=("STOP",))
    rig.run()
    assert rig.text("k") == "one two "
    assert rig.account("k").reason is StopReason.STOP


def test_held_back_text_is_shown_when_the_answer_ends() -> None:
    rig = Rig({"a": b"one STO"})
    rig.ask("k", "a|", stop=("STOP",))
    rig.run()
    assert rig.text("k") == "one STO"


def test_characters_are_whole() -> None:
    """S10."""
    rig = Rig({"a": "🐦€!".encode()})
    rig.ask("k", "a|")
    rig.run()
    chunks = [e for e in rig.events("k") if isinstance(e, TextChunk)]
    assert chunks == [TextChunk("🐦", 4), TextChunk("€", 3), TextChunk("!", 1)]


def test_waiting_and_active_requests_can_be_cancelled() -> None:
    rig = Rig({"a": b"A" * 90}, slots=1)
    rig.ask("active", "a|")
    rig.ask("waiting", "a|")
    rig.ask("next", "a|")
    rig.worker.step()
    rig.inbox.put(Cancel("waiting"))
    rig.inbox.put(Cancel("active"))
    rig.inbox.put(Cancel("nobody"))
    rig.run()
    assert rig.account("waiting").reason is StopReason.CANCELLED
    assert rig.account("waiting").completion_tokens == 0
    assert rig.account("active").reason is StopReason.CANCELLED
    assert rig.account("active").completion_tokens == 1
    assert rig.text("next") == "A" * 90


def test_a_cancel_aborts_the_reading_of_its_prompt_and_spoils_nobody_else() -> None:
    """S2.

    1. "other" is answering; "long" begins to read a long prompt in the same step.
    2. The cancel of "long" comes while that step is decoded, which is therefore aborted.
    3. Both caches are cut back; "other" decodes its token again and goes on as if alone.
    """
    rig = Rig({"a": b"ABCDEFGH", "b": b"B"})
    rig.ask("other", "a|")
    rig.worker.step()
    rig.ask("long", "b" + "x" * 100 + "|")

    def cancel_once() -> None:
        if rig.model.batch_sizes[-1] > 8:
            rig.model.during_decode = lambda: None
            rig.inbox.put(Cancel("long"))

    rig.model.during_decode = cancel_once
    rig.run()
    account = rig.account("long")
    assert account.reason is StopReason.CANCELLED
    assert account.prompt_tokens == 102
    assert not any(isinstance(event, PromptProgress) for event in rig.events("long"))
    assert rig.text("other") == "ABCDEFGH"
    assert [bytes(cache) for cache in rig.model.caches] == [b"a|ABCDEFGH", b""]


def test_seconds_are_shared_and_add_up() -> None:
    """D18."""
    rig = Rig({"a": b"A" * 10, "b": b"B" * 30})
    rig.ask("one", "a" + "x" * 60 + "|")
    rig.ask("two", "b|")
    rig.ask("three", "a|")
    rig.run()
    accounts = [rig.account(key) for key in ("one", "two", "three")]
    busy = rig.steps[-1].busy_seconds
    assert sum(a.work_seconds for a in accounts) == pytest.approx(busy)
    assert busy == pytest.approx(SECONDS_PER_TOKEN * sum(rig.model.batch_sizes))
    one, two, three = accounts
    assert one.queue_seconds == 0
    assert three.queue_seconds > 0
    assert one.prefill_seconds > 60 * SECONDS_PER_TOKEN
    assert two.decode_seconds > 29 * SECONDS_PER_TOKEN


def test_resting_takes_its_share_of_the_time_and_a_cancel_does_not_wait_for_it() -> None:
    rig = Rig({"a": b"A" * 20}, cpu_share_ratio=0.25)
    rig.ask("k", "a|")
    rig.run()
    busy = rig.steps[-1].busy_seconds
    account = rig.account("k")
    assert account.decode_seconds + account.prefill_seconds > 3.5 * busy
    rig.model.now += 100.0
    rig.ask("cancelled", "a|")
    rig.worker.step()
    assert rig.worker.seconds_to_next_step()
    decoded = len(rig.model.batch_sizes)
    rig.inbox.put(Cancel("cancelled"))
    rig.worker.step()
    assert rig.account("cancelled").reason is StopReason.CANCELLED
    assert len(rig.model.batch_sizes) == decoded


def test_a_silent_answer_still_shows_that_work_goes_on() -> None:
    """L17: text that is held back must not look like a stall."""
    rig = Rig({"a": b"A" * 90}, context_tokens=200)
    rig.ask("k", "a|", stop=("A" * 95,))
    rig.worker.step()
    rig.model.now += 1.0
    rig.steps.clear()
    rig.worker.step()
    assert len(rig.steps) == 1
    assert rig.steps[0].events == ()


def test_an_idle_worker_waits_for_commands() -> None:
    rig = Rig({})
    assert rig.worker.seconds_to_next_step() is None
    rig.worker.step()
    assert rig.steps == []


def test_a_turn_of_a_session_reads_only_what_is_new() -> None:
    rig = Rig({"a": b"A"})
    rig.ask("first", "a one|", session_id="s")
    rig.run()
    rig.model.batch_sizes.clear()
    rig.ask("second", "a one|A two|", session_id="s")
    rig.run()
    assert rig.text("second") == "A"
    assert rig.account("first").cached_prompt_tokens == 0
    account = rig.account("second")
    assert account.prompt_tokens == 12
    assert account.cached_prompt_tokens == 7
    assert rig.model.batch_sizes == [5, 1]
    progress = [e for e in rig.events("second") if isinstance(e, PromptProgress)]
    assert progress == [PromptProgress(12, 12)]


def test_a_prompt_that_is_there_already_is_read_from_its_last_token() -> None:
    rig = Rig({"a": b"A"})
    for key in ("first", "again"):
        rig.ask(key, "a one|", session_id="s")
        rig.run()
    assert rig.text("again") == "A"
    assert rig.account("again").cached_prompt_tokens == 5


@pytest.mark.parametrize(
    ("reuse", "session_id", "cached"),
    [
        (PrefixReuse.ANY, "", 47),
        (PrefixReuse.SYSTEM, "other", 40),
        (PrefixReuse.SYSTEM, "same", 47),
        (PrefixReuse.SESSION, "other", 0),
        (PrefixReuse.SESSION, "same", 47),
        (PrefixReuse.OFF, "same", 0),
    ],
)
def test_what_others_may_start_from_is_for_the_operator_to_say(
    reuse: PrefixReuse, session_id: str, cached: int
) -> None:
    rig = Rig({"a": b"A"}, prefix_reuse=reuse)
    system = "a" + "y" * 38 + "/"
    rig.ask("first", system + "secret one|", session_id="same")
    rig.run()
    rig.ask("second", system + "secret two|", session_id=session_id)
    rig.run()
    assert rig.text("second") == "A"
    assert rig.account("second").cached_prompt_tokens == cached


def test_a_model_that_cannot_cut_back_reuses_whole_sequences_only() -> None:
    rig = Rig({"a": b"A"}, slots=1)
    rig.model.is_recurrent = True
    rig.model.can_abort = False
    rig.ask("first", "a one|", session_id="s")
    rig.run()
    rig.ask("longer", "a one|A two|", session_id="s")
    rig.run()
    rig.ask("other", "a one|B|", session_id="s")
    rig.run()
    cached = [rig.account(key).cached_prompt_tokens for key in ("first", "longer", "other")]
    assert cached == [0, 7, 0]
    assert rig.text("longer") == rig.text("other") == "A"


def test_what_a_cancelled_prompt_has_read_is_kept() -> None:
    rig = Rig({"a": b"A"}, slots=1)
    prompt = "a" + "x" * 150 + "|"
    rig.ask("gone", prompt, session_id="s")
    rig.worker.step()
    rig.inbox.put(Cancel("gone"))
    rig.worker.step()
    read = len(rig.model.caches[0])
    assert 0 < read < 152
    rig.ask("again", prompt, session_id="s")
    rig.run()
    assert rig.account("again").cached_prompt_tokens == read
    assert rig.text("again") == "A"


def test_a_gap_between_busy_slots_is_closed_and_nobody_notices() -> None:
    rig = Rig({"a": b"A" * 80, "b": b"B" * 3, "c": b"C" * 80}, slots=3)
    for name in "abc":
        rig.ask(name, f"{name}|", session_id=name)
    rig.run()
    assert rig.model.swaps == 1
    assert rig.text("a") == "A" * 80
    assert rig.text("c") == "C" * 80
    # What was kept in the gap has moved as well, and is found where it is now.
    rig.ask("again", "b|BBB more|", session_id="b")
    rig.run()
    assert rig.account("again").cached_prompt_tokens == 5
    assert rig.text("again") == "BBB"


def test_a_bad_grammar_is_rejected_before_anything_is_decoded() -> None:
    rig = Rig({"a": b"A"})
    rig.ask("k", "a|", grammar="root ::= bad")
    rig.run()
    (error,) = rig.events("k")
    assert isinstance(error, RejectedError)
    assert error.kind is RejectionKind.INVALID_REQUEST
    assert rig.model.batch_sizes == []


def test_a_grammar_that_gets_stuck_ends_its_own_answer_alone() -> None:
    rig = Rig({"a": b"AAA", "b": b"BBB"})
    rig.ask("stuck", "a|", grammar="stuck")
    rig.ask("fine", "b|", grammar='root ::= "B"+')
    rig.run()
    error = rig.events("stuck")[-1]
    assert isinstance(error, RejectedError)
    assert error.kind is RejectionKind.INVALID_REQUEST
    assert rig.text("fine") == "BBB"
    assert rig.model.samplers == {}
    assert rig.worker.seconds_to_next_step() is None
