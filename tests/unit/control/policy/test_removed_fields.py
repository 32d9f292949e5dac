"""Policies with fields that were removed: new ones are refused, and those of earlier versions are still read."""

from __future__ import annotations

import json
import logging
import re
import sqlite3
import tomllib
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from meridian.v1 import policy_pb2

from meridian_control.common.errors import PolicyError
from meridian_control.policy.formats import (
    from_older_proto,
    from_proto,
    parse_stored_toml,
    parse_toml,
    to_stored_toml,
    to_toml,
)
from meridian_control.policy.model import PER_REQUEST, Policy
from meridian_control.policy.removed_fields import REMOVED, Removed
from meridian_control.policy.store import PolicyStore
from meridian_control.storage.database import Database
from tests.processes import ROOT

POLICIES = ROOT / "tests" / "data" / "policies"
# A policy as 0.3.0 stored it, with removed fields.
STORED = (POLICIES / "stored-0.3.0.toml").read_text()
NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
KINDS = descriptor_pb2.FieldDescriptorProto
TYPES = {bool: KINDS.TYPE_BOOL, int: KINDS.TYPE_INT32, float: KINDS.TYPE_DOUBLE, list: KINDS.TYPE_STRING}


def other(removed: Removed) -> Any:
    """Return a value of the field that is not its default, as it is reported."""
    if isinstance(removed.default, list):
        return ["…"]
    return not removed.default if isinstance(removed.default, bool) else removed.default + 3


def encoded(name: str, removed: Removed, value: Any) -> bytes:
    """Return the field as a client that still has it encodes it in its section's message."""
    file = descriptor_pb2.FileDescriptorProto(name=f"{name}.proto", package="before", syntax="proto2")
    message = file.message_type.add(name="Section")
    kind = type(removed.default)
    label = KINDS.LABEL_REPEATED if kind is list else KINDS.LABEL_OPTIONAL
    message.field.add(name=name, number=removed.number, type=TYPES[kind], label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    section = message_factory.GetMessageClass(pool.FindMessageTypeByName("before.Section"))
    return bytes(section(**{name: value}).SerializeToString())


def message_of(section: str, name: str, value: Any, *, in_override: bool = False) -> policy_pb2.Policy:
    made = policy_pb2.Policy()
    holder: Any = made.override.add() if in_override else made
    getattr(holder, section).MergeFromString(encoded(name, REMOVED[section, name], value))
    return made


def spelled(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


EVERY = [pytest.param(*field, id=".".join(field)) for field in REMOVED]


@pytest.mark.parametrize(("section", "name"), EVERY)
def test_nothing_takes_its_place(section: str, name: str) -> None:
    """The messages reserve name and number, so no later field is read as the removed one."""
    policy = policy_pb2.Policy.DESCRIPTOR.fields_by_name[section].message_type
    override = policy_pb2.Override.DESCRIPTOR.fields_by_name[section].message_type
    for kind in (policy, override):
        assert kind is not None
        proto = descriptor_pb2.DescriptorProto()
        kind.CopyToProto(proto)
        assert name in proto.reserved_name
        assert any(span.start <= REMOVED[section, name].number < span.end for span in proto.reserved_range)
    assert name not in type(getattr(Policy(), section)).model_fields
    assert name not in PER_REQUEST[section]


@pytest.mark.parametrize("where", ["", "override."])
@pytest.mark.parametrize("is_default", [True, False])
@pytest.mark.parametrize(("section", "name"), EVERY)
def test_a_file_that_names_it_is_refused(section: str, name: str, is_default: bool, where: str) -> None:
    removed = REMOVED[section, name]
    value = removed.default if is_default else other(removed)
    head = "[[override]]\n" if where else ""
    with pytest.raises(PolicyError) as caught:
        parse_toml(f"{head}{section}.{name} = {spelled(value)}")
    path = f"override[0].{section}.{name}" if where else f"{section}.{name}"
    assert str(caught.value) == f"{path} was removed after version {removed.until}: {removed.instead}"


@pytest.mark.parametrize("in_override", [False, True])
@pytest.mark.parametrize(("section", "name"), EVERY)
def test_a_message_that_sets_it_is_refused(section: str, name: str, in_override: bool) -> None:
    """Values come through the wire as they are, negative ones too; more than one may come."""
    removed = REMOVED[section, name]
    wanted = [other(removed), *([-7] if type(removed.default) is int else [])]
    for value in wanted:
        made = message_of(section, name, value, in_override=in_override)
        with pytest.raises(PolicyError) as caught:
            from_proto(made)
        path = f"override[0].{section}.{name}" if in_override else f"{section}.{name}"
        assert str(caught.value) == f"{path} was removed after version {removed.until}: {removed.instead}"
        policy, (found,) = from_older_proto(made)
        assert policy == from_proto(policy_pb2.Policy.FromString(b"") if not in_override else with_override())
        assert str(found).startswith(f"{path} = {spelled(value)} has no effect: it was removed after ")


def with_override() -> policy_pb2.Policy:
    made = policy_pb2.Policy()
    made.override.add()
    return made


@pytest.mark.parametrize("in_override", [False, True])
@pytest.mark.parametrize(("section", "name"), EVERY)
def test_a_message_with_its_default_means_the_same_without_it(section: str, name: str, in_override: bool) -> None:
    made = message_of(section, name, REMOVED[section, name].default, in_override=in_override)
    assert from_proto(made) == from_proto(with_override() if in_override else policy_pb2.Policy())


def test_other_numbers_and_other_sections_have_no_such_field() -> None:
    """A number that one section reserves is an unknown field elsewhere."""
    number = REMOVED["entropy", "same_answer_samples"].number
    made = policy_pb2.Policy()
    made.fallback.MergeFromString(bytes([number >> 4 << 7 | 0x80 | number << 3 & 0x7F, number >> 4, 1]))
    with pytest.raises(PolicyError, match=f'fallback."field {number}" is not a known key'):
        from_proto(made)
    for path in (
        "fallback.near_repeated_tokens",
        "near_repeated_tokens",
        "model.loop.near_repeated_tokens",
        "entropy.rank_conditions[0].same_answer_samples",
    ):
        holder, _, name = path.rpartition("[0].")
        text = f"{holder} = [{{{name} = 1}}]" if holder else f"{path} = 1"
        with pytest.raises(PolicyError, match=re.escape(f"{path} is not a known key")):
            parse_toml(text)


# -------------------------------------------------------------------------------------------------------------- stores


def without(values: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a policy without removed fields, and without tables that are then empty."""
    for (section, name), removed in REMOVED.items():
        for holder in (values, *values.get("override", ())):
            if name in holder.get(section, {}):
                assert type(holder[section].pop(name)) is type(removed.default)
                if not holder[section]:
                    del holder[section]
    return values


def test_what_an_earlier_version_stored_is_read_without_it() -> None:
    policy, found = parse_stored_toml(STORED)
    assert [(".".join(map(str, field.loc)), field.value) for field in found] == [
        ("entropy.margin_threshold_nats", 0.5),
        ("entropy.same_answer_samples", 8),
        ("loop.near_repeated_tokens", 720),
        ("loop.near_shadow", False),
        ("override.1.entropy.same_answer_samples", 3),
        ("override.1.loop.entropy_collapse_ratio", 0.25),
    ]
    assert (policy.entropy.rpdi_threshold, policy.loop.shadow) == (2.0, False)
    assert [entry.tenant for entry in policy.override] == ["b", "c"]
    assert policy.override[0].scheduler.max_think_tokens == 99  # type: ignore[attr-defined]


def test_the_earlier_version_reads_what_is_stored_now() -> None:
    """It refuses fields that it does not know, and gives those that are not there their defaults."""
    stored = tomllib.loads(to_stored_toml(parse_stored_toml(STORED)[0]))
    known = without(tomllib.loads(STORED))
    assert stored.pop("override") == known.pop("override")
    assert stored == known


async def test_a_store_warns_once_of_each_value_that_had_an_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = f"sqlite+aiosqlite:///{tmp_path / 'policy.db'}"
    await (await Database.open(file)).close()
    plain = to_toml(parse_toml('[[override]]\ntenant = "b"\nloop.shadow = true'))
    before = plain.replace("[loop]\n", "[loop]\nnear_repeated_tokens = 0\nnear_shadow = true\n")
    before = before.replace("override.loop]\n", "override.loop]\nnear_repeated_tokens = 0\n")
    assert before.count("near_repeated_tokens = 0") == 2
    with closing(sqlite3.connect(tmp_path / "policy.db")) as connection, connection:
        for number, text in enumerate((before, STORED), 1):
            row = (number, f"e{number}", text, "ann", "why", NOW.isoformat(" "))
            columns = "revision, etag, policy, author, reason, created_at"
            connection.execute(f"INSERT INTO policy_revisions ({columns}) VALUES (?, ?, ?, ?, ?, ?)", row)
    store = PolicyStore(await Database.open(file))
    try:
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                assert (await store.get(1)).policy.override[0].loop.shadow  # type: ignore[attr-defined]
                newest = await store.current()
                assert newest is not None
                assert (newest.revision, newest.policy) == (2, parse_stored_toml(STORED)[0])
        current = await store.get(2)
        rolled_back = await store.append(current.policy, etag="e2", author="ann", reason="again", now=NOW)
        assert (await store.get(3)).policy == rolled_back.policy == current.policy
    finally:
        await store.database.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"stored policy revision 2: {field}" for field in parse_stored_toml(STORED)[1]
    ]
    assert caplog.messages[2].startswith(
        "stored policy revision 2: loop.near_repeated_tokens = 720 has no effect: it was removed after version 0.3.0: "
    )
