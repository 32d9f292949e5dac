"""A Qwen3 model with random weights, for measurements that depend only on lengths.

The model is large enough for the time of a step to matter. In greedy decoding it generates only words, because the
output rows of markers and other special tokens are zero. Thinking ends at the request's own cap. The tokenizer is the
maze's with `<tool_call>` added; the chat template has Qwen3's tool turns.
"""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING, Any

from tests.processes import MODEL

if TYPE_CHECKING:
    from pathlib import Path

SEED = 4
LAYERS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 8, 512, 1792, 8, 4, 64
VOCABULARY, POSITIONS = 640, 4096
TOOL_CALL = "<tool_call>"
# Ids of ordinary words; smaller ids are markers, white space and role names.
FIRST_WORD, LAST_WORD = 20, 619
# As in Qwen3's chat template, thinking stays in the turns after the last question, and tool calls are tagged.
CALLS = """{%- if message.tool_calls -%}{%- for call in message.tool_calls -%}
{{- '<tool_call> ' + call.function.name -}}{%- endfor -%}{%- endif -%}"""
END_OF_TURN = "{{- '<|im_start|>' + message.role + '\\n' + turn.text + '<|im_end|>\\n' -}}"


def make(folder: Path, vocabulary: int = VOCABULARY) -> Path:
    """Write the model into `folder` unless it exists there; return the folder."""
    done = folder / "model.safetensors"
    if done.exists():
        return folder
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
    _write_weights(unfinished, vocabulary)
    _write_tokenizer(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    unfinished.rename(folder)
    return folder


def parameters() -> int:
    """Return the number of the model's weights, norms left out."""
    attention = HIDDEN * HEAD_DIM * 2 * (HEADS + KV_HEADS)
    return LAYERS * (attention + 3 * HIDDEN * INTERMEDIATE) + 2 * VOCABULARY * HIDDEN


def _write_weights(folder: Path, vocabulary: int) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(SEED)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
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
