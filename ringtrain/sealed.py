"""What a rank and the authority of its job send each other, where no agent carries it: JSON objects, each with a code.

Both ends draw a nonce; codes are made with a key of both nonces and the job's secret, so that each end knows with its first
object that the other has the secret, and nothing can be said twice or changed on the way. Whoever listens can read it: keys
of worlds are therefore derived (``key_of_world``). Sans-I/O.
"""

import hmac
import json
import struct
from typing import Any

NONCE_BYTES = 32
RANK, AUTHORITY = b"rank", b"authority"
ANOTHER_SECRET = b"another secret".ljust(36, b"\0")  # in the place of the first object
LONGEST = 64 << 20  # bytes of an object
LONGEST_AT_FIRST = 16 << 10  # of one whose sender has proven nothing yet
_HEAD = struct.Struct("!32sI")


class BrokenSealError(ValueError):
    """The other end has not this job's secret, or its words were changed on the way. has_another: it has said the former."""

    def __init__(self, has_another: bool = False):
        super().__init__("it has another secret" if has_another else "it is none of this job")
        self.has_another = has_another


class Seal:
    """One end of a connection: objects in and bytes out, bytes in and objects out.

    nonces: the authority's and the rank's. own, other: the roles of both ends.
    """

    def __init__(self, secret: bytes, nonces: bytes, own: bytes, other: bytes):
        self._key = hmac.digest(secret, b"ringtrain authority: " + nonces, "sha256")
        self._own, self._other = own, other
        self._sealed = self._read = 0
        self._pending = bytearray()

    def seal(self, said: Any) -> bytes:
        """The bytes of an object."""
        data = json.dumps(said).encode()
        code = self._code(self._own, self._sealed, data)
        self._sealed += 1
        return _HEAD.pack(code, len(data)) + data

    def read(self, data: bytes) -> list[dict[str, Any]]:
        """The objects that are whole by now. Raises BrokenSealError."""
        self._pending += data
        said = []
        while len(self._pending) >= _HEAD.size:
            code, length = _HEAD.unpack_from(self._pending)
            if self._pending.startswith(ANOTHER_SECRET):
                raise BrokenSealError(has_another=True)
            if length > (LONGEST if self._read else LONGEST_AT_FIRST):
                raise BrokenSealError
            end = _HEAD.size + length
            if len(self._pending) < end:
                break
            words = bytes(self._pending[_HEAD.size : end])
            if not hmac.compare_digest(code, self._code(self._other, self._read, words)):
                raise BrokenSealError
            del self._pending[:end]
            self._read += 1
            said.append(json.loads(words))
        return said

    def _code(self, role: bytes, number: int, data: bytes) -> bytes:
        return hmac.digest(self._key, role + number.to_bytes(8, "big") + data, "sha256")


def key_of_world(secret: bytes, drawn: str) -> bytearray:
    """The secret of a world: of what the authority has drawn for it, in hexadecimal, which others may have read."""
    return bytearray(hmac.digest(secret, b"ringtrain world " + bytes.fromhex(drawn), "sha256"))
