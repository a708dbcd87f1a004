"""The handshake of two processes, without a socket: honest ends, strangers, whoever is between them, and faults in each check."""

from __future__ import annotations

import hmac
import re
import struct
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringtrain._rendezvous import handshake

SECRET, OTHER = b"\7" + bytes(31), b"\10" + bytes(31)
VECTORS = dict(
    re.findall(
        r'^VECTOR\((\w+), "(\w+)"\)',
        (Path(__file__).parents[1] / "native/handshake_vectors.def").read_text(),
        re.MULTILINE,
    )
)
TCP = b"rt-tcp-1"
CLAIM = struct.pack("<QII", 0x123456789ABCDEF0, 1 << 8 | 3, 2)


def carry(caller: Any, answerer: Any, step: int = 1 << 20) -> tuple[list[Any], list[Any], list[tuple[str, bytes]]]:
    """Carries bytes until nobody has more; what the answerer and the caller have heard, and all that was sent."""
    heard: dict[str, list[Any]] = {"caller": [], "answerer": []}
    sent = []
    while caller.has_more or answerer.has_more:
        for name, one, other in (("answerer", caller, answerer), ("caller", answerer, caller)):
            data = one.take()
            if data:
                sent.append((name, data))
            for begin in range(0, len(data), step):
                heard[name] += other.hear(data[begin : begin + step])
    return heard["answerer"], heard["caller"], sent


def refused(end: Any, data: bytes) -> Any:
    """The error with which an end refuses these bytes; None if it goes on."""
    try:
        end.hear(data)
    except ValueError as error:
        return error
    return None


# ---- what must hold; each takes the module, which may have a fault ----


def honest_ends_prove_themselves(of: Any) -> None:
    for step in (1, 7, 1 << 20):
        caller, answerer = of.Caller(SECRET, CLAIM), of.Answerer(SECRET)
        caller.say({"a": 1})
        answerer.say(["ü"])
        assert not caller.is_proven and not answerer.is_proven
        assert carry(caller, answerer, step)[:2] == ([{"a": 1}], [["ü"]])
        assert caller.is_proven and answerer.is_proven and answerer.claim == CLAIM
        assert caller.record_key == answerer.record_key != of.key_of(SECRET)
        answerer.say({"b": 2})
        assert carry(caller, answerer, step)[1] == [{"b": 2}]


def no_two_handshakes_are_alike(of: Any) -> None:
    keys = set()
    for _ in range(3):
        caller, answerer = of.Caller(SECRET), of.Answerer(SECRET)
        carry(caller, answerer)
        keys.add(caller.record_key)
    assert len(keys) == 3
    one, other = of.Caller(SECRET, nonce=bytes(16)), of.Answerer(SECRET)
    carry(one, other)
    again, last = of.Caller(SECRET, nonce=bytes(16)), of.Answerer(SECRET)
    carry(again, last)
    assert one.record_key != again.record_key, "the answerer's nonce is a new one"


def another_secret_is_refused_and_told(of: Any) -> None:
    caller, answerer = of.Caller(OTHER), of.Answerer(SECRET)
    caller.say({"mine": 1})
    answerer.hear(caller.take())
    caller.hear(answerer.take())
    proof = caller.take()
    assert len(proof) == 32, "no object leaves before the answer"
    assert refused(answerer, proof).has_another and not answerer.is_proven
    last = answerer.take()
    assert len(last) == 32 and refused(caller, last).has_another and not caller.is_proven


def who_answers_without_the_secret_is_not_believed(of: Any) -> None:
    for answer in (bytes(32), bytes(range(32)), b"proof"):
        caller = of.Caller(SECRET)
        caller.say({"mine": 1})
        greeting = caller.take()
        assert caller.hear(bytes(16)) == []
        proof = caller.take()
        wrong = proof if answer == b"proof" else answer  # its own proof, sent back
        assert refused(caller, wrong) is not None and not caller.is_proven and not caller.has_more
        assert len(greeting) == 40


def a_stranger_gets_a_nonce_and_a_refusal(of: Any) -> None:
    for data in (bytes(100), b"\xff" * 5000, b"GET / HTTP/1.1\r\n\r\n" * 8):
        answerer = of.Answerer(SECRET)
        assert refused(answerer, data) is not None and answerer.take() == b""
    answerer = of.Answerer(SECRET)
    assert refused(answerer, of.OBJECTS + bytes(1000)) is not None
    assert len(answerer.take()) == 16 + 32 and not answerer.is_proven
    assert refused(of.Answerer(SECRET), b"rt-call") is None and refused(of.Answerer(SECRET), b"rt-xall") is not None


def a_proof_does_not_serve_again(of: Any) -> None:
    caller, answerer = of.Caller(SECRET), of.Answerer(SECRET)
    sent = carry(caller, answerer)[2]
    (_, greeting), (_, proof) = [part for part in sent if part[0] == "answerer"]
    again = of.Answerer(SECRET)
    again.hear(greeting)
    assert refused(again, proof) is not None and not again.is_proven
    other = of.Caller(SECRET)
    other.take()
    (_, challenge), (_, answer) = [part for part in sent if part[0] == "caller"]
    other.hear(challenge)
    assert refused(other, answer) is not None and not other.is_proven


def parts_that_are_changed_prove_nothing(of: Any) -> None:
    """Any byte of any part: one of the ends refuses, and the other one is not proven by it."""
    sizes = {("answerer", 0): 40, ("caller", 0): 16, ("answerer", 1): 32, ("caller", 1): 32}
    for (to, part), size in sizes.items():
        for place in range(size):
            caller, answerer = of.Caller(SECRET, CLAIM), of.Answerer(SECRET)
            ends = {"caller": caller, "answerer": answerer}
            problem, number = None, {"caller": 0, "answerer": 0}
            while problem is None and (caller.has_more or answerer.has_more):
                for name, one in (("answerer", caller), ("caller", answerer)):
                    data = bytearray(one.take())
                    if not data:
                        continue
                    if (name, number[name]) == (to, part):
                        data[place] ^= 4
                    number[name] += 1
                    problem = problem or refused(ends[name], bytes(data))
            assert problem is not None, (to, part, place)
            assert not ends["caller"].is_proven, (to, part, place)


def a_part_that_is_cut_off_proves_nothing(of: Any) -> None:
    caller, answerer = of.Caller(SECRET), of.Answerer(SECRET)
    answerer.hear(caller.take()[:-1])
    assert not answerer.has_more
    caller, answerer = of.Caller(SECRET), of.Answerer(SECRET)
    answerer.hear(caller.take())
    caller.hear(answerer.take())
    answerer.hear(caller.take()[:-1])
    assert not answerer.is_proven and not answerer.has_more


def proven(of: Any) -> tuple[Any, Any]:
    caller, answerer = of.Caller(SECRET), of.Answerer(SECRET)
    carry(caller, answerer)
    return caller, answerer


def bytes_of(end: Any, said: Any) -> bytes:
    end.say(said)
    return bytes(end.take())


def objects_are_refused_that_are_changed_repeated_left_out_or_sent_back(of: Any) -> None:
    caller, answerer = proven(of)
    first, second = bytes_of(caller, {"a": 1}), bytes_of(caller, {"a": 2})
    assert refused(answerer, second) is not None, "left out"
    caller, answerer = proven(of)
    first = bytes_of(caller, {"a": 1})
    assert answerer.hear(first) == [{"a": 1}]
    assert refused(answerer, first) is not None, "repeated"
    caller, answerer = proven(of)
    assert refused(answerer, bytes_of(answerer, {"a": 1})) is not None, "sent back"
    caller, answerer = proven(of)
    other = bytes_of(proven(of)[0], {"a": 1})
    assert refused(answerer, other) is not None, "of another connection"
    for place in (0, 31, 42):  # the last is the digit
        caller, answerer = proven(of)
        changed = bytearray(bytes_of(caller, {"a": 1}))
        changed[place] ^= 1
        assert refused(answerer, bytes(changed)) is not None, place


def an_object_that_is_too_long_is_refused_by_its_head(of: Any) -> None:
    _, answerer = proven(of)
    assert refused(answerer, bytes(32) + (of.LONGEST + 1).to_bytes(4, "big")) is not None
    _, answerer = proven(of)
    assert refused(answerer, bytes(32) + of.LONGEST.to_bytes(4, "big")) is None, "its words may still come"


HOLDS = [
    honest_ends_prove_themselves,
    no_two_handshakes_are_alike,
    another_secret_is_refused_and_told,
    who_answers_without_the_secret_is_not_believed,
    a_stranger_gets_a_nonce_and_a_refusal,
    a_proof_does_not_serve_again,
    parts_that_are_changed_prove_nothing,
    a_part_that_is_cut_off_proves_nothing,
    objects_are_refused_that_are_changed_repeated_left_out_or_sent_back,
    an_object_that_is_too_long_is_refused_by_its_head,
]


@pytest.mark.parametrize("holds", HOLDS, ids=lambda each: each.__name__)
def test_the_handshake(holds: Callable[[Any], None]) -> None:
    holds(handshake)


# ---- the same, with a fault in one check ----

FAULTS = {
    "the answerer believes": ('if not hmac.compare_digest(proof, self._proof(b"proof")):', "if False:"),
    "the caller believes": ('if not hmac.compare_digest(answer, self._proof(b"answer")):', "if False:"),
    "one label for both": ('self._proof(b"answer")', 'self._proof(b"proof")'),
    "the key is any": ('hmac.digest(secret, b"ringtrain tcp hello", "sha256")', "bytes(32)"),
    "the greeting is not under the proof": ("label + self._greeting + self._challenge", "label + self._challenge"),
    "the challenge is not under the proof": ("label + self._greeting + self._challenge", "label + self._greeting"),
    "nonces that stay": ("nonce or secrets.token_bytes(NONCE_BYTES)", "nonce or bytes(NONCE_BYTES)"),
    "any protocol": ("if not self._protocol.startswith(bytes(self._heard[: len(self._protocol)])):", "if False:"),
    "nobody is told": ("self._unsent += REFUSAL", "pass"),
    "a refusal is an answer like any": ("if answer == REFUSAL:", "if False:"),
    "objects leave at once": ("if not self.is_proven:\n            self._waiting", "if False:\n            self._waiting"),
    "codes are not compared": ("if not hmac.compare_digest(code, self._code", "if False and (self._code"),
    "a code of nothing but the text": ("role + number.to_bytes(8, \"big\") + text", "text"),
    "a code without the role": ("role + number.to_bytes(8, \"big\") + text", "number.to_bytes(8, \"big\") + text"),
    "a code without the number": ("role + number.to_bytes(8, \"big\") + text", "role + text"),
    "a code without the text": ("role + number.to_bytes(8, \"big\") + text", "role + number.to_bytes(8, \"big\")"),
    "objects of the job's key": ("hmac.digest(self.record_key,", "hmac.digest(self._key,"),
    "numbers that stay": ("self._read += 1", "pass"),
    "any length": ("if length > LONGEST:", "if False:"),
    "half a part": ("if len(self._heard) < size:", "if not self._heard:"),
    "half an object": ("if len(self._heard) < _HEAD.size + length:", "if False:"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_check_is_found(fault: str) -> None:
    source, (right, wrong) = Path(handshake.__file__).read_text(), FAULTS[fault]
    assert right in source, "this check is not there any more"
    faulty = types.ModuleType("faulty")
    exec(compile(source.replace(right, wrong), "faulty", "exec"), faulty.__dict__)

    def fails(holds: Callable[[Any], None]) -> bool:
        try:
            holds(faulty)
        except Exception:
            return True
        return False

    assert any(map(fails, HOLDS)), fault


# ---- the twin in C++ ----


def test_the_core_says_the_same_bytes() -> None:
    """Its test of tcp/hello.h has the same vectors."""
    vectors = {name: bytes.fromhex(digits) for name, digits in VECTORS.items()}
    caller = handshake.Caller(SECRET, CLAIM, TCP, vectors["caller_nonce"])
    answerer = handshake.Answerer(SECRET, TCP, vectors["answerer_nonce"])
    said = [part for _, part in carry(caller, answerer)[2]]
    assert said == [vectors[name] for name in ("greeting", "challenge", "proof", "answer")]
    assert caller.record_key == answerer.record_key == vectors["record_key"]
    assert answerer.claim == CLAIM


def test_a_key_of_a_world_follows_from_the_secret() -> None:
    made = handshake.key_of_world(SECRET, "00")
    assert made == hmac.digest(SECRET, b"ringtrain world \0", "sha256") != handshake.key_of_world(OTHER, "00")
