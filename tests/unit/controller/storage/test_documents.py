import json

from controller.domain.refusal import Refusal, RefusalReason
from controller.request_manager.refusals import refusal_text
from controller.storage.documents import kept_record, record_document
from tests.fakes.records import finished_record


def test_refusals_come_back_with_their_figures() -> None:
    record = finished_record()
    kept = kept_record(record_document(record, keep_prompt=True))
    assert record.placement is not None
    assert kept.placement == record.placement


def test_refusals_that_were_kept_as_one_sentence_are_still_told() -> None:
    document = json.loads(record_document(finished_record(others=2), keep_prompt=True))
    sentences = [None, "node is offline; serves small, not large"]
    for other, sentence in zip(document["placement"]["others"], sentences, strict=True):
        del other["refusals"]
        other["refusal"] = sentence
    placement = kept_record(json.dumps(document, separators=(",", ":")).encode()).placement
    assert placement is not None
    first, second = placement.others
    assert first.refusals == ()
    assert second.refusals == (Refusal(RefusalReason.AS_KEPT, (str(sentences[1]),)),)
    assert refusal_text(second) == sentences[1]
