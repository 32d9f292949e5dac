"""Stand-ins for models that vLLM's tests name: a scheduler reads of a model no more than its shape.

There is no model hub where these tests run. Without stand-ins nearly all tests of the scheduler fail before they have
made one.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# The shape that transformers has for this model by default; vLLM's tests build nearly all their schedulers for it.
OPT = "facebook/opt-125m"
THINK = {"<think>": 50270, "</think>": 50271}


def put_into_cache(hub: Path) -> None:
    """Write the stand-ins where Hugging Face's cache has its models.

    The tokenizer has few words, and the markers of thinking at ids that no test uses: every request answers, none
    thinks, so that the default policy has nothing to put before anything else.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import OPTConfig, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(64)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({**words, **THINK}, unk_token="w0")),
        unk_token="w0",
        pad_token="w1",
        eos_token="w2",
    )
    folder = hub / f"models--{OPT.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / "main").write_text(snapshot.name)
    tokenizer.save_pretrained(snapshot)
    config = OPTConfig(architectures=["OPTForCausalLM"], dtype="float16").to_dict()
    (snapshot / "config.json").write_text(json.dumps(config, default=str))
