"""A deterministic simulator: engines and a control plane on one virtual clock, with faults, all from one integer seed.

Real are vLLM's scheduler, the agent with its link's protocol, Fleet and Session. The model, the network and the time
are simulated.
"""
