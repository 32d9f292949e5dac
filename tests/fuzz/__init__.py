"""Structure-aware fuzzing of both ends of the stream and of every parser, with valid form and hostile content.

Python's own generators make the cases. A coverage-guided fuzzer (atheris) would need clang, and it instruments C code,
of which these parsers have none. These parsers also do not break under flipped bits, but under values that are allowed
and absurd.
"""
