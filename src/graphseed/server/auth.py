"""Who may ask, and from where: API keys and CORS, as llama-server has them.

Owns ApiKeys and Cors: what a request's headers come to. Does not answer requests.
"""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

PUBLIC_PATHS: Final = frozenset({"/health", "/v1/health"})  # the page adds its own
LOCALHOST: Final = "localhost"  # of --cors-origins: whoever asks from this machine
_LOCAL_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_ALLOWED: Final = {
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    "Access-Control-Allow-Headers": "*",
}


class ApiKeys:
    """The keys of one server. No keys: everybody may."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def admits(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether `Authorization: Bearer KEY`, or else `X-Api-Key: KEY`, names one of the keys.

        Takes the same time whichever key is nearly right, and for any length.
        """
        if not self._digests:
            return True
        given = headers.get(b"authorization", b"") or headers.get(b"x-api-key", b"")
        digest = _digest(given.removeprefix(b"Bearer "))
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        return any(matches)


class Cors:
    """Which origins a browser may use the server from.

    No origins, or "*": whoever asks. "localhost": pages of this machine, on any port.
    """

    def __init__(self, origins: Iterable[str]) -> None:
        self._origins = frozenset(origin.rstrip("/") for origin in origins)
        self.allows_all = not self._origins or "*" in self._origins

    def headers(self, origin: str | None) -> dict[str, str]:
        """Headers of any answer to a request from `origin`."""
        if not origin or not self._allows(origin):
            return {}
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}

    def preflight_headers(self, origin: str | None) -> dict[str, str]:
        """Headers of the answer to OPTIONS."""
        return {**self.headers(origin), **_ALLOWED}

    def _allows(self, origin: str) -> bool:
        if self.allows_all or origin in self._origins:
            return True
        return LOCALHOST in self._origins and _is_local(origin)


def _is_local(origin: str) -> bool:
    try:
        return urlsplit(origin).hostname in _LOCAL_HOSTS
    except ValueError:  # no address at all
        return False


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
