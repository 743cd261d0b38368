from controller.domain.request import ChatMessage, InferenceRequest
from controller.ids import RequestId, new_request_id


def test_text_is_all_that_the_model_reads() -> None:
    raw = InferenceRequest(RequestId("r"), "Once upon a time")
    chat = InferenceRequest(
        RequestId("r"), (ChatMessage("system", "Be brief."), ChatMessage("user", "Hello"))
    )
    assert (raw.text, raw.is_chat) == ("Once upon a time", False)
    assert (chat.text, chat.is_chat) == ("Be brief.\nHello", True)


def test_new_ids_differ_and_pass_the_check_of_ids() -> None:
    ids = {new_request_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(0 < len(name) <= 128 and name.isascii() for name in ids)
