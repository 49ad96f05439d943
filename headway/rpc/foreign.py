"""A status that no server of ours sent, in words for a person.

gRPC's own library, or a proxy on the way, ends calls as well. What the library
says then is meant for those who write it; its texts are known by their parts.
What is not known is passed on as it is.
"""

import re

import grpc

__all__ = ["is_too_large", "plain_words"]

_CODE = grpc.StatusCode
# By gRPC's core at whichever end sends or receives it.
_TOO_LARGE = re.compile(r"(Sent|Received) message larger than max \((\d+) vs\. (\d+)\)")
# (part of gRPC's text, what it means); the first that is found.
_AWAY = (
    ("errors resolving", "no server{at}: its name is not known"),
    ("DNS resolution", "no server{at}: its name is not known"),
    ("Connection refused", "no server{at}: nobody listens there"),
    ("timed out", "no server{at}: it cannot be reached"),
    ("failed to connect", "no server{at}: it cannot be reached"),
    ("unreachable", "no server{at}: it cannot be reached"),
    ("onnection reset", "the connection to the server{at} was lost"),
    ("ocket closed", "the connection to the server{at} was lost"),
    ("GOAWAY", "the connection to the server{at} was lost"),
    ("keepalive", "the connection to the server{at} was lost: it gave no sign of life"),
)


def is_too_large(details: str) -> bool:
    """Whether gRPC refused to send or to take a message for its size."""
    return _TOO_LARGE.search(details) is not None


def plain_words(code: grpc.StatusCode, details: str, address: str = "") -> str:
    """What the status means; `details` themselves where they are not gRPC's.

    Args:
        code: of the status.
        details: its text.
        address: where the call went; empty where that is not known.
    """
    at = f" at {address}" if address else ""
    size = _TOO_LARGE.search(details)
    if size is not None:
        # Received by the client: then it is the answer.
        what = "the answer" if "CLIENT: Received" in details else "the message"
        return f"{what} has {int(size[2]):,} bytes; expected at most {int(size[3]):,}"
    if code is _CODE.UNAVAILABLE:
        for part, meaning in _AWAY:
            if part in details:
                return meaning.format(at=at)
    if code is _CODE.DEADLINE_EXCEEDED and details == "Deadline Exceeded":
        return "no answer in time"
    if code is _CODE.UNIMPLEMENTED:
        return f"the server{at} does not know this call; expected a Headway server of this version"
    return details or code.name
