"""What goes wrong, in the shape in which OpenAI's clients read it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from foretoken.core.errors import ForetokenError

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
}


class ApiError(Exception):
    """An answer that is an error.

    status: of HTTP. message: one sentence that names the input and says what to do. param: the field that is meant.
    code: a word for programs. headers: beside the usual ones.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        kind = KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> Response:
        """The whole answer. Non-ASCII is escaped, since a field's name may be no valid Unicode."""
        return Response(json.dumps(self.body), self.status, self.headers, "application/json")


@contextmanager
def refusing(param: str) -> Iterator[None]:
    """What the block refuses becomes a 400. param: the field that is meant."""
    try:
        yield
    except ForetokenError as error:
        raise ApiError(400, str(error), param) from error


def refused(error: ForetokenError, fields: Mapping[str, Any]) -> ApiError:
    """A 400 for what the engine would refuse.

    fields: of the request; the one that the sentence begins with is named.
    """
    first = str(error).split(" ", 1)[0]
    return ApiError(400, str(error), first if first in fields else None)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response


async def on_http_error(request: Request, error: Exception) -> Response:
    """Unknown addresses and methods, and bodies that cannot be read."""
    assert isinstance(error, HTTPException)
    what = {
        404: f"There is nothing at {request.url.path}: clients need /v1 at the end of the base URL; docs/serving.md "
        "lists the endpoints.",
        405: f"{request.url.path} does not answer to {request.method}.",
        400: "The body cannot be read: send a JSON object.",
    }
    return ApiError(error.status_code, what.get(error.status_code, str(error.detail)), headers=error.headers).response


async def on_invalid(request: Request, error: Exception) -> Response:
    """What pydantic found in a body, as one sentence about the first field."""
    assert isinstance(error, RequestValidationError)
    return invalid(error.errors(), error.body).response


def invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """errors: pydantic's, at least one. body: what was sent. Of the members of a union all tell what they want: those
    that got furthest are believed."""
    found = errors[0]
    places = {id(error): _place(error, body) for error in errors if error["loc"][:2] == found["loc"][:2]}
    place = max(places.values(), key=lambda each: each.count("."))
    fitting = [error for error in errors if places.get(id(error)) == place]
    fitting = [error for error in fitting if not error["type"].endswith("_type")] or fitting  # it is of a good type
    kind, wanted = fitting[0]["type"], dict.fromkeys(error["msg"] for error in fitting)
    if kind == "json_invalid":
        return ApiError(400, "The body is not valid JSON: send a JSON object.")
    if kind == "string_unicode" and not place:
        return ApiError(400, "The name of a field is not valid Unicode: leave the field out.")
    if not place:
        return ApiError(400, "The body is no JSON object: send one, with content-type application/json.")
    if kind == "extra_forbidden":
        said = f"Unknown field {place}: this server has no such field; docs/serving.md lists those that it has."
    elif kind == "missing":
        said = f"{place} is missing: it must be given."
    else:
        said = f"{place} is not what it must be: {' or '.join(wanted).replace('Input should be ', '')}."
    return ApiError(400, said, place)


def _place(error: Any, body: Any) -> str:
    """The field that pydantic means, such as messages.0.content; it also names the members of unions, left out here."""
    path, place = error["loc"][1:], []
    for key in path:
        if isinstance(body, Mapping):
            if key not in body and place and not (key == path[-1] and error["type"] == "missing"):
                continue
            place.append(str(key))
            body = body.get(key)
        elif isinstance(body, list) and isinstance(key, int) and key < len(body):
            place.append(str(key))
            body = body[key]
    return ".".join(place)
