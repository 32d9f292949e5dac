"""Draws pictures of a terminal with commands of the guide and what they have printed."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

FOLDER = Path(__file__).parent
# The pictures, and the headings of the guide whose commands each of them shows.
PICTURES = {
    "look": ("Look", "See what the rules would do"),
    "roll_out": ("Calibrate", "Roll out", "Watch"),
    "undo": ("Undo",),
}
# rich's picture loads a font from the web; without these rules the viewer's own monospaced font is used.
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


def prompted(command: str) -> list[str]:
    """Return the lines in which a terminal shows a command."""
    first, *others = command.split("\n")
    return [f"$ {first}", *(f"  {line}" for line in others)]


def draw(recorded: Mapping[str, Sequence[tuple[str, str]]]) -> dict[Path, str]:
    """Return the content of each picture's file by its path. recorded: commands and their output by heading."""
    files = {}
    for name, headings in PICTURES.items():
        lines = []
        for command, output in (pair for heading in headings for pair in recorded[heading]):
            lines += [Text(line, style="bold") for line in prompted(command)]
            lines += map(Text, output.splitlines())
        console = Console(record=True, width=max(map(len, lines)), file=io.StringIO())
        console.print(Text("\n").join(lines))
        svg = FONTS.sub("", console.export_svg(title="", unique_id=name))
        files[FOLDER / f"{name}.svg"] = "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"
    return files
