"""Keeps the last good settings on disk, so that an engine can start with them if no control plane answers.

The module owns the file and the thread that writes it; no other thread waits for the disk, except at the engine's
start. Knows no vLLM and no network. A file that cannot be read or written is logged once and otherwise ignored.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import threading
from pathlib import Path
from typing import Any
from urllib.parse import quote

from google.protobuf import json_format
from meridian.v1 import agent_pb2

logger = logging.getLogger("vllm.meridian")

FORMAT = 1
MAX_BYTES = 1 << 20


def state_folder() -> Path:
    """Return the folder in MERIDIAN_STATE_DIR, or else `meridian` in the user's cache directory."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("MERIDIAN_STATE_DIR") or Path(cache) / "meridian")


class StateFile:
    """The settings file of one engine in `folder`. `keep` may be called on any thread."""

    def __init__(self, folder: Path, engine_id: str, model: str) -> None:
        self.path = folder / f"{quote(engine_id, safe='')}.json"
        self._owner = {"format": FORMAT, "engine_id": engine_id, "model": model}
        self._wanted: queue.SimpleQueue[agent_pb2.Settings] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._complained = False

    def load(self) -> agent_pb2.Settings | None:
        """Read the settings from the file; None if it has no settings that this engine can use.

        A policy section with a lease of its own is an experiment, which must end if the engine restarts without the
        control plane: so the cap and the answer reserve of such a section are left out.
        """
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
        return settings

    def _settings_of(self, kept: Any) -> Any:
        if not isinstance(kept, dict) or not isinstance(kept.get("settings"), dict):
            raise ValueError("the file has no settings")
        for name, expected in self._owner.items():
            if kept.get(name) != expected:
                raise ValueError(f"{name} is {kept.get(name)!r}, not {expected!r}")
        return kept["settings"]

    def keep(self, settings: agent_pb2.Settings) -> None:
        """Write these settings soon, on the writer's thread; they replace settings that still wait to be written."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._wanted.get_nowait()
        self._wanted.put(settings)
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._write_all, name="meridian-state", daemon=True)
            self._thread.start()

    def _write_all(self) -> None:
        while True:
            with contextlib.suppress(Exception):
                self._write_newest(self._wanted.get())

    def _write_newest(self, settings: agent_pb2.Settings) -> None:
        try:
            while not self._wanted.empty():
                settings = self._wanted.get()
            self._write(settings)
            self._complained = False
        except Exception as error:
            if not self._complained:
                logger.warning("meridian: cannot keep the settings for a restart in %s: %s", self.path, error)
            self._complained = True

    def _write(self, settings: agent_pb2.Settings) -> None:
        text = json.dumps({**self._owner, "settings": json_format.MessageToDict(settings)}, indent=1)
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
