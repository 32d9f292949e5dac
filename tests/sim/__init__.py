"""A deterministic simulator: engines and control plane on one virtual clock, with faults, from one integer seed.

Real: vLLM's scheduler, the agent with its link's protocol, Fleet and Session. Made up: the model, the network, time.
"""
