"""The context file: control planes by name, so that nobody types addresses. One is the current one.

    current = "staging"

    [contexts.staging]
    server = "10.0.0.7:50051"
    ca = "staging-ca.pem"
    token_file = "~/.meridian/staging.token"

It is MERIDIAN_CONTEXTS, else meridian/contexts.toml in the user's configuration directory. Paths in it begin at its
folder.
"""

import os
import tomllib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from meridian_control.access.client_credentials import ClientCredentials
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
        said = (self.ca, self.cert, self.key, self.token_file)
        return ClientCredentials(*(str(path().parent / os.path.expanduser(name)) if name else "" for name in said))


class Contexts(_Strict):
    current: str = ""
    contexts: dict[str, Context] = {}


def path() -> Path:
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(os.environ.get("MERIDIAN_CONTEXTS") or home / "meridian" / "contexts.toml")


def load() -> Contexts:
    """The file's contexts, none where there is no file. Raises FileError."""
    file = path()
    try:
        return Contexts.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
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
    """The context of that name, by default the current one; None where no name is given or set. Raises FileError."""
    found = load()
    wanted = name or found.current
    if wanted and wanted not in found.contexts:
        raise FileError(path(), "", f'has no context "{wanted}"; it has {", ".join(sorted(found.contexts)) or "none"}')
    return found.contexts[wanted] if wanted else None
