"""Structure-aware fuzzing of both ends of the stream and of everything that parses: valid form, hostile content.

Python's own generators make the cases. A coverage-guided fuzzer (atheris) needs clang and instruments C code that none
of this has; and what breaks these parsers is not found by flipping bits but by values that are allowed and absurd.
"""
