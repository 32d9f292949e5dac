"""Keeps the last good settings on disk, so that an engine can start with them if no control plane answers.

The module owns the file and the thread that writes it; no other thread waits for the disk, except at the engine's
start. Knows no vLLM and no network. A file that cannot be read or written is logged once and otherwise ignored.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf import descriptor_pb2, json_format
from meridian.v1 import agent_pb2

from meridian_agent.link.environment import home_folder, read

logger = logging.getLogger("vllm.meridian")

FORMAT = 1
MAX_BYTES = 1 << 20


def _removed_keys() -> frozenset[str]:
    """Return the keys, in JSON, of the fields that earlier versions of Settings had: the message reserves their names.
    A file of an earlier version may have them."""
    message = descriptor_pb2.DescriptorProto()
    agent_pb2.Settings.DESCRIPTOR.CopyToProto(message)
    words = (name.split("_") for name in message.reserved_name)
    return frozenset(first + "".join(map(str.capitalize, others)) for first, *others in words)


def state_folder() -> Path | None:
    """Return the folder in MERIDIAN_STATE_DIR, or else `meridian` in the user's cache directory; None if there is
    neither, because the user has no home folder."""
    if said := read("MERIDIAN_STATE_DIR"):
        return Path(os.path.expanduser(said))
    cache, home = Path(read("XDG_CACHE_HOME")), home_folder()
    # A relative path in XDG_CACHE_HOME is not valid.
    if cache.is_absolute():
        return cache / "meridian"
    return home / ".cache" / "meridian" if home is not None else None


def command_of() -> str:
    """Return a short text that stands for the command line of this engine's server. It tells servers of one host apart,
    because their ports differ."""
    return hashlib.sha256("\0".join(sys.argv).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def kept_command(folder: Path | None, name: str) -> str | None:
    """Return `command_of` for the engine that wrote the settings file of this name last; None without a file."""
    if folder is None:
        return None
    try:
        path = _path(folder, name)
        kept = json.loads(path.read_bytes()) if path.stat().st_size <= MAX_BYTES else None
        return str(kept.get("command", "")) if isinstance(kept, dict) else ""
    except OSError:
        return None
    except (ValueError, RecursionError):
        return ""


def _path(folder: Path, name: str) -> Path:
    return folder / f"{quote(name, safe='')}.json"


class StateFile:
    """The settings file of one engine in `folder`, None to keep no settings. `keep` may be called on any thread.

    name: name of the engine, which no other engine with the same folder has.
    """

    def __init__(self, folder: Path | None, name: str, model: str) -> None:
        self.path = _path(folder, name) if folder is not None else None
        self._owner = {"format": FORMAT, "engine_id": name, "model": model}
        self._wanted: queue.SimpleQueue[agent_pb2.Settings | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._complained = False
        if folder is None:
            logger.warning(
                "meridian: no settings are kept for a restart: there is no home folder; set MERIDIAN_STATE_DIR"
            )

    def load(self) -> agent_pb2.Settings | None:
        """Read the settings from the file; None if it has no settings that this engine can use.

        A policy section with a lease of its own is an experiment, which must end if the engine restarts without the
        control plane: so the cap and the answer reserve of such a section are left out.
        """
        if self.path is None:
            return None
        try:
            if self.path.stat().st_size > MAX_BYTES:
                raise ValueError(f"larger than {MAX_BYTES} bytes")
            kept = json.loads(self.path.read_bytes())
            settings = json_format.ParseDict(self._settings_of(kept), agent_pb2.Settings())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError, json_format.ParseError) as error:
            logger.warning("meridian: the settings in %s are ignored: %s", self.path, " ".join(str(error).split()))
            return None
        if settings.scheduler_lease_ms:
            settings.ClearField("max_think_tokens")
            settings.ClearField("answer_reserve_tokens")
            settings.ClearField("chat_answer_reserve_tokens")
            settings.ClearField("answer_only_stops")
        return settings

    def _settings_of(self, kept: Any) -> Any:
        if not isinstance(kept, dict) or not isinstance(kept.get("settings"), dict):
            raise ValueError("the file has no settings")
        for name, expected in self._owner.items():
            if kept.get(name) != expected:
                raise ValueError(f"{name} is {kept.get(name)!r}, not {expected!r}")
        removed = _removed_keys()
        return {name: value for name, value in kept["settings"].items() if name not in removed}

    def keep(self, settings: agent_pb2.Settings) -> None:
        """Write these settings soon, on the writer's thread; they replace settings that still wait to be written."""
        if self.path is None:
            return
        with contextlib.suppress(queue.Empty):
            while True:
                self._wanted.get_nowait()
        self._wanted.put(settings)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_all, name="meridian-state", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the writer's thread once it has written what `keep` was given; another call of `keep` starts it anew."""
        self._wanted.put(None)

    def _write_all(self) -> None:
        while (settings := self._wanted.get()) is not None:
            with contextlib.suppress(Exception):
                self._write_or_complain(settings)

    def _write_or_complain(self, settings: agent_pb2.Settings) -> None:
        try:
            self._write(settings)
            self._complained = False
        except Exception as error:
            if not self._complained:
                logger.warning("meridian: cannot keep the settings for a restart in %s: %s", self.path, error)
            self._complained = True

    def _write(self, settings: agent_pb2.Settings) -> None:
        assert self.path is not None
        kept = {**self._owner, "command": command_of(), "settings": json_format.MessageToDict(settings)}
        text = json.dumps(kept, indent=1)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        try:
            with new.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            new.replace(self.path)
        except BaseException:
            new.unlink(missing_ok=True)
            raise
