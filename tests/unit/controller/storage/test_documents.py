import json

from controller.domain.cluster import Calibration
from controller.domain.known_calibration import CalibrationKey, KnownCalibration
from controller.domain.refusal import Refusal, RefusalReason
from controller.request_manager.refusals import refusal_text
from controller.storage.documents import (
    kept_calibration,
    kept_hello,
    kept_record,
    record_document,
)
from tests.fakes.records import finished_record
from tests.fakes.reports import hello


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


_EARLIER_CALIBRATION = (
    '{"prefill_rate":200.0,"decode_rate":20.0,"saturated_decode_rate":60.0,'
    '"utilisation_ratio":1.0,"measured_slots":0,"load_watts":null,"engine_version":"",'
    '"power_mode":"","prefill_joules_per_token":null,"decode_joules_per_token":null}'
)


def test_calibration_of_an_earlier_version_keeps_its_speeds() -> None:
    document = (
        '{"key":{"hardware":"Pi 5","digest":"d","engine_version":"e","power_mode":"15W"},'
        f'"calibration":{_EARLIER_CALIBRATION},"completions":3}}'
    )
    expected = KnownCalibration(
        CalibrationKey("Pi 5", "d", "e", "15W"), Calibration(200.0, 20.0, 60.0), 3
    )
    assert kept_calibration(document) == expected


def test_node_of_an_earlier_version_keeps_the_speeds_of_its_models() -> None:
    document = (
        '{"node_id":"pi","instance_id":"first-start","attributes":{"kind":"edge",'
        '"hardware":"Board","cpu_cores":4,"memory_bytes":4000000000,"operating_system":"Linux",'
        '"agent_version":"0.1.0","engine_version":"fake","power":{"idle_watts":3.0,'
        '"max_watts":12.0,"transmit_watts":0.0,"receive_watts":0.0,"is_estimate":true},'
        '"is_link_metered":false,"receive_usd_per_byte":0.0,"transmit_usd_per_byte":0.0},'
        '"models":[{"name":"small","family":"test","parameters_billions":1.0,'
        f'"quantisation":"Q4_K_M","digest":"{64 * "0"}","phase":"ready","issue":"",'
        f'"context_tokens":2048,"slots":4,"calibration":{_EARLIER_CALIBRATION},'
        '"price":{"prompt_usd_per_token":0.0,"completion_usd_per_token":0.0,"request_usd":0.0},'
        '"has_chat_template":true,"characters_per_token":4.0,"is_base_model":false,'
        '"refuses_raw_prompts":false,"is_pinned":false,"progress_ratio":null,'
        '"resident_bytes":null,"supports_response_format":false}]}'
    )
    assert kept_hello(document) == hello()
