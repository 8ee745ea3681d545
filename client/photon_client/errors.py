"""What can go wrong, as exceptions. Every one carries `.code` and `.message`; `str()` gives `[CODE] message`."""

from __future__ import annotations

import re

import grpc


class PhotonError(Exception):
    """Base of all errors of this client."""

    code = "INTERNAL"

    def __init__(self, message: str) -> None:
        super().__init__(f"[{self.code}] {message}")
        self.message = message


class InvalidArgument(PhotonError, ValueError):
    """The request itself is wrong; sending it again cannot help."""

    code = "INVALID_ARG"


class Unavailable(PhotonError):
    """The server cannot be reached, is full, or its engine is restarting; trying again later can help."""

    code = "UNAVAILABLE"


class Internal(PhotonError):
    """The server failed, or answered something that it never should."""

    code = "INTERNAL"


class PhotonTimeout(PhotonError, TimeoutError):
    """The `timeout` of the call ran out; the request was cancelled on the server."""

    code = "TIMEOUT"


_BY_CODE: dict[str, type[PhotonError]] = {kind.code: kind for kind in (InvalidArgument, Unavailable, Internal)}
_PREFIX = re.compile(r"\[([A-Z_]+)\] (.*)", re.DOTALL)


def from_text(text: str) -> PhotonError:
    """The error that a text of the server stands for.

    The back end writes `[CODE] sentence`, because Triton's streams lose the code. Texts of Triton itself have no
    code; the one that users meet is an unknown model: the back end unloads its models while no engine is up.
    """
    match = _PREFIX.match(text)
    if match and match[1] in _BY_CODE:
        return _BY_CODE[match[1]](match[2])
    if text.startswith("Request for unknown model"):
        return Unavailable(f"the server has no model ready at the moment, try again later ({text})")
    return Internal(text or "the server gave no reason")


def from_rpc(error: grpc.RpcError, address: str, timeout: float | None) -> PhotonError:
    """The error that a failed call to `address` stands for. `error` has .code() and .details(), as all of grpc's do."""
    status, details = error.code(), error.details() or ""
    if _PREFIX.match(details):
        return from_text(details)
    if status is grpc.StatusCode.DEADLINE_EXCEEDED:
        return PhotonTimeout(f"no complete answer within {timeout} s; the request was cancelled")
    if status is grpc.StatusCode.UNAVAILABLE:
        reason = re.split("[:(]", details)[-1].strip(" ])")  # gRPC wraps the reason in the story of its attempts
        return Unavailable(f"no connection to the server at {address}: {reason}")
    if status is grpc.StatusCode.CANCELLED:
        return Unavailable(f"the call to the server at {address} was cancelled: {details}")
    if status is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return InvalidArgument(f"the request is larger than the server at {address} accepts: {details}")
    return from_text(details)
