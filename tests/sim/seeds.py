"""Seeds that failed once, each with what it found. They are run by every `make test`.

What a seed does changes with the simulator: each bug is among `mutants` too, and when the simulator has changed, the
seed here is the first that notices it there. What can be shown more directly has a test of its own beside them.
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
