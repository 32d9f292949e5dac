"""Measures the files of an image and says what they belong to."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

# A package's folder, in a virtual environment or in the folder that the init container copies.
PACKAGE = re.compile(r"(?:.*/site-packages|/agent)/([^/]+)")
LIBRARY = re.compile(r"\.so(\.|$)")
SHOWN = 6


def files(root: Path) -> dict[str, int]:
    """Return the size in bytes of each regular file below `root` by its path within it; hard links count once."""
    found, seen = {}, set()
    for folder, _, names in os.walk(root):
        for name in names:
            path = os.path.join(folder, name)
            about = os.lstat(path)
            if not os.path.islink(path) and about.st_ino not in seen:
                seen.add(about.st_ino)
                found[path.removeprefix(str(root))] = about.st_size
    return found


def added(image: Mapping[str, int], base: Mapping[str, int]) -> dict[str, int]:
    """Return the files of an image that its base lacks or has in another size."""
    return {path: size for path, size in image.items() if base.get(path) != size}


def owner(path: str) -> str:
    """Return what a file belongs to: a package, the metadata of packages, or its topmost folder."""
    if (found := PACKAGE.match(path)) is None:
        return "/" + path.split("/")[1]
    name = found[1]
    if name.endswith(".dist-info"):
        return "metadata and licences of packages"
    name = re.sub(r"(\.libs|\.py|\.[^.]*\.so|\.abi3\.so)$", "", name)
    return "Meridian" if name.startswith("meridian") else name


def table(found: Mapping[str, int]) -> list[str]:
    """Return a Markdown table of the largest owners of these files, in MB of 10⁶ bytes."""
    whole: Counter[str] = Counter()
    native: Counter[str] = Counter()
    for path, size in found.items():
        whole[owner(path)] += size
        native[owner(path)] += size if LIBRARY.search(path) else 0
    shown = [name for name, _ in whole.most_common(SHOWN)]
    others = whole.keys() - set(shown)
    rows = [(name, whole[name], native[name]) for name in shown]
    if others:
        rows.append((f"{len(others)} others", sum(whole[n] for n in others), sum(native[n] for n in others)))
    rows.append(("**all**", whole.total(), native.total()))
    lines = [f"| {name} | {size / 1e6:.1f} | {libraries / 1e6:.1f} |" for name, size, libraries in rows]
    return ["| content | MB | of it native libraries |", "|---|---|---|", *lines]
