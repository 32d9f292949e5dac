"""A soak: a real vLLM server and a real control plane under requests, faults and policies drawn from one seed.

The checks do not need to know what was drawn: clients check each answer, the recorded trace shows every decision, and
the processes' own figures show what they keep.
"""
