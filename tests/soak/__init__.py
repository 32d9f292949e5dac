"""A soak: a real vLLM server and a real control plane under requests, faults and policies drawn from one seed.

What is checked needs no knowledge of what was drawn: clients look at each answer, the recorded trace at every decision,
and the processes' own figures at what they keep.
"""
