"""Write the greedy tokens of stock vLLM for the shared cases: `python -m tests.engine.stock OUT.json`."""

import json
import sys
from pathlib import Path

from tests.engine import ENGINE_ARGS, MAX_TOKENS, cases, chat


def main() -> None:
    import vllm

    llm = vllm.LLM(**ENGINE_ARGS)
    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    tokens = chat(llm, cases(), params)
    # The file appears complete, because other processes wait for it.
    written = Path(sys.argv[1]).with_suffix(".written")
    written.write_text(json.dumps(tokens))
    written.rename(sys.argv[1])


if __name__ == "__main__":
    main()
