"""Hostile text and bytes for every parser of a file, of a message, or of a request's own parameters.

Each parser has its own error, which is the only one it may raise. Accepted input survives a round trip.
"""

from __future__ import annotations

import gzip
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from meridian.v1 import fleet_pb2, policy_pb2

from meridian_agent.core import request_info as overrides
from meridian_control.cli import contexts
from meridian_control.common.errors import PolicyError
from meridian_control.offline import trace_file as trace
from meridian_control.policy import formats as forms
from meridian_control.policy.model import Policy, Who
from tests.fuzz.hostile import DOUBLES, LONG, TEXTS, Hostile
from tests.sim.policies import draw

POLICIES = sorted((Path(__file__).parent.parent / "data" / "policies").glob("*/*.toml"))
FRAGMENTS = (
    b"[[override]]\n",
    b"[model.x]\n",
    b'model."\\u0000"',
    b"= 1e400\n",
    b"= -0\n",
    b"= nan\n",
    b"= inf\n",
    b"= 0x7fffffffffffffff\n",
    b"= 1979-05-27\n",
    b"= '''",
    b'"""',
    b"[[[",
    b"{a = {b = {",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\x00",
    b"\r",
    b"\xed\xa0\x80",
    b"[" * 400,
    b"a." * 400,
    b"9" * 5000,
    b"*?[!" * 60,
)
WHO = (Who(), Who("m", "a" * 300, "\x00", "é", {"zone": "a"}), Who("[", "]", "*", "?", {}))


def _mutated(rng: random.Random, text: bytes) -> bytes:
    """Return the text with some bytes exchanged, removed, doubled, or replaced by bytes that parsers mishandle."""
    for _ in range(rng.choice((0, 1, 1, 2, 8))):
        at, until = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        until = min(until, at + 40)
        middle = rng.choice((b"", text[at:until] * 2, rng.choice(FRAGMENTS), rng.randbytes(rng.randint(1, 4))))
        text = text[:at] + middle + text[until:]
    return text


def _in_file(content: bytes, read: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / forms.FILE_NAME
        path.write_bytes(content)
        return read(path)


def _names(complaints: object) -> None:
    assert complaints, "an error that says nothing"


def _check_policy(policy: Policy) -> None:
    assert forms.parse_toml(forms.to_toml(policy)) == policy == forms.from_proto(forms.to_proto(policy))
    for who in WHO:
        own = policy.of(who)
        assert own.scheduler.min_think_tokens <= own.scheduler.max_think_tokens


# ---------------------------------------------------------------------------------------------------------- policies


def make_toml(rng: random.Random) -> bytes:
    if rng.random() < 0.5:
        return _mutated(rng, rng.choice(POLICIES).read_bytes())
    return _mutated(rng, forms.to_toml(draw(rng, 0.3)).encode())


def run_toml(content: bytes) -> None:
    """Parse as `--policy`, `--policy-dir` and `meridianctl policy apply` do."""
    try:
        policy = _in_file(content, forms.load_config)
    except PolicyError as error:
        _names(error.violations())
        return
    _check_policy(policy)


def make_message(rng: random.Random) -> bytes:
    message = forms.to_proto(draw(rng, 0.3)) if rng.random() < 0.5 else policy_pb2.Policy()
    Hostile(rng, rng.choice((0.3, 0.8))).fill(message)
    return _mutated(rng, message.SerializeToString()) if rng.random() < 0.2 else message.SerializeToString()


def run_message(content: bytes) -> None:
    message = policy_pb2.Policy()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return
    try:
        policy = forms.from_proto(message)
    except PolicyError as error:
        _names(error.violations())
        return
    _check_policy(policy)


# --------------------------------------------------------------------------------------------------- requests' words


def make_words(rng: random.Random) -> bytes:
    """Return vllm_xargs as JSON that Python reads: numbers may be NaN, infinite or of many digits."""
    values: tuple[Any, ...] = (*LONG, *DOUBLES, *TEXTS, -1, 10**400, True, None, [], [1], {}, "12", "\ud800")
    names = ("tenant", "slo_class", "effort", "min_think_tokens", "max_think_tokens", "else")
    return json.dumps({f"meridian_{name}": rng.choice(values) for name in names if rng.random() < 0.7}).encode()


def run_words(content: bytes) -> None:
    try:
        said = json.loads(content)
    except ValueError:
        return
    own = overrides.read(said if isinstance(said, dict) else {})
    for text in own[:3]:
        text.encode()
        assert len(text) <= overrides.MAX_TEXT
    for tokens in (own.min_think_tokens, own.max_think_tokens):
        assert tokens is None or 0 <= tokens <= overrides.MAX_TOKENS
    assert len(own.complaint) < 1000


# ------------------------------------------------------------------------------------------------------------- files


def make_trace(rng: random.Random) -> bytes:
    """Return compressed records with their lengths, damaged before or after the compression."""
    content = b""
    for _ in range(rng.randint(0, 4)):
        record = Hostile(rng, 0.9).fill(fleet_pb2.TraceRecord(session_id="s"))
        body = record.SerializeToString()
        length = len(body) if rng.random() < 0.8 else rng.choice(LONG)
        content += _varint(length) + body
    if rng.random() < 0.5:
        content = _mutated(rng, content)
    packed = gzip.compress(content, 1, mtime=0)
    return _mutated(rng, packed) if rng.random() < 0.3 else packed


def _varint(number: int) -> bytes:
    found = b""
    while number > 0x7F:
        found, number = found + bytes([number & 0x7F | 0x80]), number >> 7
    return found + bytes([number])


def run_trace(content: bytes) -> None:
    def read(path: Path) -> None:
        for record in trace.read(path):
            assert record.session_id

    try:
        _in_file(content, read)
    except trace.FileError as error:
        _names(str(error))


CONTEXTS = (
    b'current = "staging"\n\n[contexts.staging]\nserver = "10.0.0.7:1"\nkey = "~/k"\n\n[contexts."b c"]\nserver = ""\n'
)


def make_contexts(rng: random.Random) -> bytes:
    return _mutated(rng, CONTEXTS)


def run_contexts(content: bytes) -> None:
    def read(path: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MERIDIAN_CONTEXTS", str(path))
            for name in ("", "staging", "\x00"):
                try:
                    if (found := contexts.find(name)) is not None:
                        found.credentials()
                except trace.FileError as error:
                    _names(str(error))

    _in_file(content, read)
