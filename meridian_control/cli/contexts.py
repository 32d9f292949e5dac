"""Reads the context file, which gives names to control planes; `current` is the name of the default context.

    current = "staging"

    [contexts.staging]
    server = "10.0.0.7:50051"
    ca = "staging-ca.pem"
    token_file = "~/.meridian/staging.token"

MERIDIAN_CONTEXTS names the context file; by default the file is meridian/contexts.toml in the user's configuration
directory. A relative path in the context file starts at the folder of the context file.
"""

import json
import os
import re
import shutil
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from meridian_control.common.client_credentials import ClientCredentials
from meridian_control.common.environment import config_home, read
from meridian_control.offline.trace_file import FileError


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Context(_Strict):
    server: str
    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""

    def credentials(self) -> ClientCredentials:
        """Return the credentials; a relative path starts at the folder of the context file."""
        said, file = (self.ca, self.cert, self.key, self.token_file), path()
        folder = file.parent if file is not None else Path()
        return ClientCredentials(*(str(folder / os.path.expanduser(name)) if name else "" for name in said))


class Contexts(_Strict):
    current: str = ""
    contexts: dict[str, Context] = {}


def path() -> Path | None:
    """Return the context file; None if the environment names none and the user has no home folder."""
    if said := read("MERIDIAN_CONTEXTS"):
        return Path(os.path.expanduser(said))
    home = config_home()
    return home / "meridian" / "contexts.toml" if home is not None else None


def load() -> Contexts:
    """Return the contexts of the context file, or no contexts if the file does not exist. Raises FileError."""
    file = path()
    if file is None:
        return Contexts()
    try:
        return Contexts.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except FileNotFoundError:
        return Contexts()
    except OSError as error:
        raise FileError(file, "", f"cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors()[0]
        raise FileError(file, "", f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    except ValueError as error:
        raise FileError(file, "", str(error)) from error


def find(name: str) -> Context | None:
    """Return the context with this name, or the current context if `name` is empty; None if no context is current.

    Raises FileError.
    """
    stored = load()
    wanted = name or stored.current
    if wanted and wanted not in stored.contexts:
        if (file := path()) is None:
            raise FileError(Path("meridian/contexts.toml"), "", "there is no home folder: set MERIDIAN_CONTEXTS")
        raise FileError(
            file, "", f'has no context "{wanted}"; known contexts: {", ".join(sorted(stored.contexts)) or "none"}'
        )
    return stored.contexts[wanted] if wanted else None


def use(name: str) -> Path:
    """Make the context with this name the current one, and return the context file. Everything else in the file stays
    as it is. Raises FileError."""
    find(name)
    file = path()
    assert file is not None, "a context has been found"
    line = f"current = {json.dumps(name, ensure_ascii=False)}"
    try:
        text = file.read_bytes().decode("utf-8-sig")
        head, tables, rest = re.fullmatch(r"(.*?)(^\s*\[|\Z)(.*)", text, re.DOTALL | re.MULTILINE).groups()  # type: ignore[union-attr]
        changed, count = re.subn(r"^\s*current\s*=[^\r\n]*", lambda _: line, head, count=1, flags=re.MULTILINE)
        end = "\r\n" if "\r\n" in text else "\n"
        target = file.resolve()
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        draft.write_bytes(((changed if count else line + 2 * end + head) + tables + rest).encode())
        shutil.copymode(target, draft)
        draft.replace(target)
    except OSError as error:
        raise FileError(file, "", f"cannot be written: {error.strerror}") from error
    return file
