"""Write stock vLLM's answers to the known prompts: `python -m tests.soak.stock OUT.json`, {mode: [[token]]}."""

import json
import sys
from pathlib import Path

from tests.engine import ENGINE_ARGS, chat
from tests.soak.asks import KNOWN, KNOWN_TOKENS, TEMPLATES


def main() -> None:
    import vllm

    llm = vllm.LLM(**ENGINE_ARGS)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=KNOWN_TOKENS)
    cases = [{"prompt": prompt, "template": template} for template in TEMPLATES.values() for prompt in KNOWN]
    said = iter(chat(llm, cases, params))
    Path(sys.argv[1]).write_text(json.dumps({mode: [next(said) for _ in KNOWN] for mode in TEMPLATES}))


if __name__ == "__main__":
    main()
