"""Stand-ins for models that vLLM's tests name, because a scheduler reads only the shape of a model.

These tests run without a model hub. Without stand-ins nearly all tests of the scheduler would fail before they have
made one.
"""

from __future__ import annotations

import json
from pathlib import Path

# The shape that transformers has for this model by default; vLLM's tests build nearly all their schedulers for it.
OPT = "facebook/opt-125m"
THINK = {"<think>": 50270, "</think>": 50271}


def put_into_cache(hub: Path) -> None:
    """Write the stand-ins into Hugging Face's cache folder.

    The tokenizer has few words, and the markers of thinking at ids that no test uses. So every request answers and none
    thinks, and the default policy has no phase to prefer.
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
