"""A Qwen3 model with random weights, for measurements that depend only on lengths.

By default the model is large enough for the time of a step to matter. In greedy decoding it generates only words,
because the output rows of markers and other special tokens are zero. Thinking ends at the request's own cap. The
tokenizer is the maze's with `<tool_call>` added; the chat template has Qwen3's tool turns.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import MODEL

SEED = 4
VOCABULARY, POSITIONS = 640, 4096
TOOL_CALL = "<tool_call>"
# Ids of ordinary words; smaller ids are markers, white space and role names.
FIRST_WORD, LAST_WORD = 20, 619
# As in Qwen3's chat template, thinking stays in the turns after the last question, and tool calls are tagged.
CALLS = """{%- if message.tool_calls -%}{%- for call in message.tool_calls -%}
{{- '<tool_call> ' + call.function.name -}}{%- endfor -%}{%- endif -%}"""
END_OF_TURN = "{{- '<|im_start|>' + message.role + '\\n' + turn.text + '<|im_end|>\\n' -}}"


@dataclass(frozen=True)
class Size:
    """sharpness: by how much the logits of words are spread more than those of other random weights."""

    sharpness: float = 1.0
    layers: int = 8
    hidden: int = 512
    intermediate: int = 1792
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64

    def parameters(self, vocabulary: int = VOCABULARY) -> int:
        """Return the number of weights, norms left out."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * vocabulary * self.hidden


MEDIUM = Size()
# A step takes little more than vLLM's own Python code does. Drawn at random, too, tokens are words.
TINY = Size(sharpness=5.0, layers=2, hidden=256, intermediate=512, heads=4, kv_heads=2)


def make(folder: Path, vocabulary: int = VOCABULARY, size: Size = MEDIUM) -> Path:
    """Write the model into `folder` unless it exists there; return the folder."""
    done = folder / "model.safetensors"
    if done.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    _write_weights(unfinished, vocabulary, size)
    _write_tokenizer(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder


def _write_weights(folder: Path, vocabulary: int, size: Size) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=False,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.06,
    )
    model: Any = Qwen3ForCausalLM(config)
    rows = model.lm_head.weight.data
    rows[:FIRST_WORD] = 0.0
    rows[LAST_WORD + 1 :] = 0.0
    rows *= size.sharpness
    model.save_pretrained(folder)


def _write_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    tokenizer["added_tokens"].append({"id": LAST_WORD + 1, "content": TOOL_CALL, **flags})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    shutil.copy(MODEL / "tokenizer_config.json", folder)
    template = (MODEL / "chat_template.jinja").read_text()
    before, end, after = template.partition(END_OF_TURN)
    if not end:
        raise ValueError("the maze's chat template does not end its turns as expected")
    turn, closing = END_OF_TURN.split(" + '<|im_end|>")
    end = turn + " -}}" + CALLS + "{{- '<|im_end|>" + closing
    (folder / "chat_template.jinja").write_text(before + end + after)
