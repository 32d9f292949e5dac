"""Write a model folder whose thinking markers take several tokens, as those of gpt-oss and Granite do.

`python -m tests.data.marked` writes tests/data/marked. The module owns a byte-level BPE tokenizer, trained on a few
made-up sentences, with Harmony's special tokens. There are no weights: the engine makes random ones
(`load_format="dummy"`), because a script says which tokens the model generates
(`tests.engine.matrix.features.markers`).
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>", "<|pad|>")
EOS = "<|return|>"
CORPUS = [
    " so the walk goes on and then we turn left or right",
    "assistant analysis final commentary user",
    *("Here is my thought process:", "Here is my response:", "Here's my thought process:", "Here's my response:"),
    *(" Here is my thought process:\n\n", "\n\nHere is my response:\n\n", " Here is my response:\n\n"),
]
# The same split as o200k's: a word takes the blank before it, and punctuation takes the line feeds after it.
SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
VOCABULARY = 448
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def write(folder: Path) -> None:
    """Write the folder, which vLLM can load."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(s, special=True, normalized=False) for s in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": tokenizer.token_to_id(EOS)}))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS, "pad_token": SPECIAL[-1]})
    )


if __name__ == "__main__":
    write(Path(__file__).parent / "marked")
