"""All that the agent asks of vLLM, and which vLLM has it. Only this package and `install` name vLLM."""
