"""`meridianctl` as a program that an interrupt ends, also where a shell has let background programs ignore interrupts.

A `preexec_fn` could restore the handler, too, but it forks, and gRPC's threads, which a fork restarts, write errors
while their files are closed for the program.
"""

import signal

from meridian_control.cli.main import main

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main()
