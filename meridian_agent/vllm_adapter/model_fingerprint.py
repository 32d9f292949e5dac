"""Computes a digest of what an engine's answers depend on, so that a rule found for one model is not used for another.

Reads files when the engine starts, and after weights were loaded from files again. Of each weight file it reads samples
only, because weights may be large.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
TEXTS = (".json", ".jinja", ".txt", ".model")
# Bytes of each sample of a weight file, and samples per file, evenly spread from the beginning to the end.
SAMPLE_BYTES, SAMPLES = 4096, 16
# Bytes of another file that are read.
MOST_BYTES = 64 << 20
DIGEST_BYTES = 8


def fingerprint(vllm_config: Any, chat_template: str | None, replaced_from: str = "") -> str:
    """Return the digest as 16 hexadecimal digits: of the model's files and the kind of its numbers, or of its revision
    if the files are not in a local folder; and of the chat template. Raises OSError if a file cannot be read.

    replaced_from: the folder from which the weights were loaded that have replaced those of the start; empty if none
    have.
    """
    model = vllm_config.model_config
    weights = _files(Path(replaced_from)) if replaced_from else _weights(model)
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (*weights, model.dtype, model.quantization, chat_template or ""):
        digest.update(repr(part).encode(errors="replace"))
    return digest.hexdigest()


def _weights(model: Any) -> Iterator[object]:
    path = Path(model.model)
    if not path.exists():
        yield from (model.model, model.revision, getattr(model.hf_config, "_commit_hash", None))
        return
    yield from _files(path)


def _files(path: Path) -> Iterator[object]:
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.is_file() and file.suffix in WEIGHTS:
            yield from (file.name, file.stat().st_size, *_samples(file))
        elif file.is_file() and file.suffix in TEXTS:
            with file.open("rb") as opened:
                yield from (file.name, hashlib.blake2b(opened.read(MOST_BYTES)).digest())


def _samples(file: Path) -> Iterator[bytes]:
    last = max(0, file.stat().st_size - SAMPLE_BYTES)
    with file.open("rb") as opened:
        for number in range(SAMPLES):
            opened.seek(last * number // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)
