"""Checks the sections of a policy that capabilities bring with them, `extension.NAME`. All functions are pure."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from meridian_control.common.errors import PolicyError, Violation
from meridian_control.policy.section import Section
from meridian_control.policy.validation_errors import dotted, violation

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from meridian_control.policy.model import Policy

AnySection = TypeVar("AnySection", bound=Section)


def check(policy: Policy, schemas: Mapping[str, type[Section]]) -> None:
    """Raise PolicyError if an extension is not among the schemas, by name, or does not fit its schema."""
    if violations := list(_violations(policy, schemas)):
        raise PolicyError(violations)


def _violations(policy: Policy, schemas: Mapping[str, type[Section]]) -> Iterator[Violation]:
    for name in policy.extension:
        if (schema := schemas.get(name)) is None:
            yield Violation(dotted(("extension", name)), "is no capability of this control plane")
            continue
        try:
            extension(policy, name, schema)
        except ValidationError as error:
            for details in error.errors():
                broken = violation(schema, details)
                section = dotted(("extension", name))
                yield replace(broken, path=f"{section}.{broken.path}")


def extension(policy: Policy, name: str, schema: type[AnySection]) -> AnySection:
    """Return the section `extension.NAME` of a policy, with defaults for absent fields."""
    return schema.model_validate(policy.extension.get(name, {}))
