"""The settings of common model families that ship with Meridian: reasoning parsers, and closing texts with sources.

`model_families.toml` beside this module holds the settings; the comment above each section gives the sources. The
functions may run on any thread.
"""

from dataclasses import dataclass
from pathlib import Path

import tomli_w

from meridian_control.policy.formats import parse_toml
from meridian_control.policy.schema import ModelPolicy

FILE = Path(__file__).with_name("model_families.toml")


@dataclass(frozen=True, slots=True)
class ModelFamily:
    """A family of models: its name, the comment with the sources, as lines of TOML, and the settings."""

    name: str
    comment: str
    settings: ModelPolicy

    def section(self, served: str) -> str:
        """Return the settings as a section of a policy, in TOML, for a model that is served under this name."""
        settings = self.settings.model_dump(exclude_defaults=True)
        return f"{self.comment}\n{tomli_w.dumps({'model': {served: settings}})}"


def model_families() -> dict[str, ModelFamily]:
    """Return the families by name, in the order of the file."""
    text = FILE.read_text(encoding="utf-8")
    # A blank line separates the sections, and a section's comment is right above it.
    comments = {
        heading.split('"')[1]: block[: block.index(heading)].rstrip("\n")
        for block in text.split("\n\n")
        for heading in block.splitlines()
        if heading.startswith("[model.")
    }
    return {name: ModelFamily(name, comments[name], settings) for name, settings in parse_toml(text).model.items()}
