"""How both ends of a connection prove that they know a secret, and what they say then: objects of JSON, each with a code.

    caller                                              answerer
    greeting   protocol (8), nonce (16), claim (16)  →
                                                     ←  challenge   nonce (16)
    proof      HMAC(key, "proof", both)              →
                                                     ←  answer      HMAC(key, "answer", both)

These are the bytes of native/transport/tcp/hello.h, which has its own protocol and claim. The key of the codes is
HMAC(key, "record", both), and each code is over the sender's role and the object's number. So nothing serves twice, on another
connection, in the other direction or changed. A stranger is given a random number, and that it has another secret; who listens
can read all. Sans-I/O: bytes in, objects and bytes out.
"""

import hmac
import json
import secrets
import struct
from typing import Any

OBJECTS = b"rt-call1"  # the protocol of this module; another version of anything that is said has another name
NONCE_BYTES = 16
CLAIM_BYTES = 16
PROOF_BYTES = 32
GREETING_BYTES = len(OBJECTS) + NONCE_BYTES + CLAIM_BYTES
REFUSAL = b"another secret".ljust(PROOF_BYTES, b"\0")  # in the place of an answer
LONGEST = 64 << 20  # bytes of an object
_HEAD = struct.Struct("!32sI")
_CALLER, _ANSWERER = b"caller", b"answerer"


class HandshakeError(ValueError):
    """The other end does not know the secret, or its words were changed on the way. has_another: it has said the former."""

    def __init__(self, has_another: bool = False):
        super().__init__("it has another secret" if has_another else "it is none of this job")
        self.has_another = has_another


def key_of(secret: bytes) -> bytes:
    """The key of all handshakes of those who know a secret."""
    return hmac.digest(secret, b"ringtrain tcp hello", "sha256")


def key_of_world(secret: bytes, drawn: str) -> bytearray:
    """The secret of a world: of what was drawn for it, in hexadecimal, which others may have read."""
    return bytearray(hmac.digest(secret, b"ringtrain world " + bytes.fromhex(drawn), "sha256"))


class _End:
    """One end of a connection. Give `hear` what comes and send what `take` returns, until it raises."""

    def __init__(self, secret: bytes, protocol: bytes, nonce: bytes, roles: tuple[bytes, bytes]):
        self._key, self._protocol = key_of(secret), protocol
        self._nonce = nonce or secrets.token_bytes(NONCE_BYTES)
        self._own, self._other = roles
        self._heard, self._unsent = bytearray(), bytearray()
        self._waiting: list[bytes] = []  # objects that are sent once both ends are proven
        self._greeting = self._challenge = b""
        self.record_key = b""
        self._sealed = self._read = 0

    @property
    def is_proven(self) -> bool:
        """Whether the other end knows the secret."""
        return bool(self.record_key)

    @property
    def has_more(self) -> bool:
        """Whether `take` has something to send."""
        return bool(self._unsent)

    def say(self, said: Any) -> None:
        """An object for the other end; it leaves when that one is proven."""
        self.say_text(json.dumps(said).encode())

    def say_text(self, text: bytes) -> None:
        """`say`, of an object that has been written for several."""
        if not self.is_proven:
            self._waiting.append(text)
            return
        self._unsent += _HEAD.pack(self._code(self._own, self._sealed, text), len(text)) + text
        self._sealed += 1

    def take(self) -> bytes:
        """What is to be sent now."""
        taken, self._unsent = bytes(self._unsent), bytearray()
        return taken

    def hear(self, data: bytes) -> list[Any]:
        """The objects that are whole by now. Raises HandshakeError, after which `take` may have a last word."""
        self._heard += data
        while not self.is_proven and self._hear_part():
            pass
        said = []
        while self.is_proven and (text := self._next_object()) is not None:
            said.append(json.loads(text))
        return said

    def _hear_part(self) -> bool:
        """Takes the next part of the handshake; False if it is not whole yet."""
        raise NotImplementedError

    def _part(self, size: int) -> bytes:
        """So many bytes of what was heard; b"" if there are fewer yet."""
        if len(self._heard) < size:
            return b""
        part = bytes(self._heard[:size])
        del self._heard[:size]
        return part

    def _proof(self, label: bytes) -> bytes:
        return hmac.digest(self._key, label + self._greeting + self._challenge, "sha256")

    def _prove(self) -> None:
        self.record_key = self._proof(b"record")
        for text in self._waiting:
            self.say_text(text)
        self._waiting.clear()

    def _next_object(self) -> bytes | None:
        if len(self._heard) < _HEAD.size:
            return None
        code, length = _HEAD.unpack_from(self._heard)
        if length > LONGEST:
            raise HandshakeError
        if len(self._heard) < _HEAD.size + length:
            return None
        text = self._part(_HEAD.size + length)[_HEAD.size :]
        if not hmac.compare_digest(code, self._code(self._other, self._read, text)):
            raise HandshakeError
        self._read += 1
        return text

    def _code(self, role: bytes, number: int, text: bytes) -> bytes:
        return hmac.digest(self.record_key, role + number.to_bytes(8, "big") + text, "sha256")


class Caller(_End):
    """The end that opens the connection. nonce: b"" for a new one."""

    def __init__(self, secret: bytes, claim: bytes = bytes(CLAIM_BYTES), protocol: bytes = OBJECTS, nonce: bytes = b""):
        super().__init__(secret, protocol, nonce, (_CALLER, _ANSWERER))
        self._greeting = protocol + self._nonce + claim
        self._unsent += self._greeting

    def _hear_part(self) -> bool:
        if not self._challenge:
            self._challenge = self._part(NONCE_BYTES)
            if self._challenge:
                self._unsent += self._proof(b"proof")
            return bool(self._challenge)
        answer = self._part(PROOF_BYTES)
        if not answer:
            return False
        if answer == REFUSAL:
            raise HandshakeError(has_another=True)
        if not hmac.compare_digest(answer, self._proof(b"answer")):
            raise HandshakeError
        self._prove()
        return True


class Answerer(_End):
    """The other end. claim: what the caller has said of itself, once it is proven."""

    def __init__(self, secret: bytes, protocol: bytes = OBJECTS, nonce: bytes = b""):
        super().__init__(secret, protocol, nonce, (_ANSWERER, _CALLER))
        self.claim = b""

    def _hear_part(self) -> bool:
        if not self._greeting:
            return self._hear_greeting()
        proof = self._part(PROOF_BYTES)
        if not proof:
            return False
        if not hmac.compare_digest(proof, self._proof(b"proof")):
            self._unsent += REFUSAL
            raise HandshakeError(has_another=True)
        self._unsent += self._proof(b"answer")
        self.claim = self._greeting[-CLAIM_BYTES:]
        self._prove()
        return True

    def _hear_greeting(self) -> bool:
        """A stranger of another protocol is turned away at its first bytes."""
        if not self._protocol.startswith(bytes(self._heard[: len(self._protocol)])):
            raise HandshakeError
        self._greeting = self._part(GREETING_BYTES)
        if self._greeting:
            self._challenge = self._nonce
            self._unsent += self._challenge
        return bool(self._greeting)
