from collections.abc import Iterator

import pytest
from grpc import StatusCode

from controller import errors
from controller.errors import PUBLIC_ERRORS, RouterError, public_error


def subclasses(kind: type[RouterError]) -> Iterator[type[RouterError]]:
    for child in kind.__subclasses__():
        yield child
        yield from subclasses(child)


EVERY_ERROR = [
    kind for kind in subclasses(RouterError) if kind.__module__.startswith("controller.")
]


def test_every_error_has_its_row_in_the_table_and_no_row_is_left_over() -> None:
    assert set(PUBLIC_ERRORS) == set(EVERY_ERROR)


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_every_error_is_drawn_in_the_tree(kind: type[RouterError]) -> None:
    assert f" {kind.__name__} " in (errors.__doc__ or "")


@pytest.mark.parametrize("kind", EVERY_ERROR)
def test_clients_see_an_error_of_theirs_or_of_ours(kind: type[RouterError]) -> None:
    public = public_error(kind("why"))
    assert 400 <= public.http_status < 600
    assert public.grpc_status not in (StatusCode.OK, StatusCode.UNKNOWN)
    assert public.code.isidentifier()


def test_codes_tell_the_errors_apart() -> None:
    codes = [public.code for public in PUBLIC_ERRORS.values()]
    assert len(codes) == len(set(codes))


def test_nobody_there_is_unavailable_and_too_many_waiting_is_exhausted() -> None:
    assert public_error(errors.NoDestinationError("")).http_status == 503
    assert public_error(errors.QueueFullError("")).http_status == 429


def test_error_of_a_kind_that_nobody_listed_is_shown_as_its_nearest_listed_kind() -> None:
    class VerySpecialError(errors.UnknownModelError):
        pass

    assert public_error(VerySpecialError("")) == PUBLIC_ERRORS[errors.UnknownModelError]
