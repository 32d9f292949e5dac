"""Seeds that failed once, each with the bug that it found. Every `make test` runs them.

The run of a seed changes with the simulator. So bugs that can be shown more directly also have a test of their own.
"""

REGRESSIONS = {
    0: "a plan that had arrived before the stream was lost was taken in past the lease",
    5: "a forced end in the first step of an idle engine that schedules ahead: vLLM broke, with no step to wait for",
    27: "a token that came after its request was preempted was taken for the resumption",
    31: "a request past its cap that began to think anew within its draft tokens thought on for a token",
    82: "a forced end of two tokens was broken off by a preemption between them, with asynchronous scheduling",
    126: "a request was held for a probe that found no room beside a prompt in pieces, and lost steps for nothing",
    261: "an answering request whose prompt came in pieces stayed behind thinking ones: it was preempted before them",
    9021354: "a freeze was over before a step saw it: the control plane waited for a snapshot, and decided nothing",
}
