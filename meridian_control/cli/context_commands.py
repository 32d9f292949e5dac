"""Implements `meridianctl context`, which lists the contexts of the context file and chooses the current one.

The module calls no control plane.
"""

from typing import Annotated

import typer

from meridian_control.cli import contexts
from meridian_control.cli.completion import context_names
from meridian_control.cli.console import INVALID, add, console, fail, new_table, reported, say

context_app = typer.Typer(help="List contexts, which name control planes, and choose one.", no_args_is_help=True)


@context_app.command("list")
def context_list() -> None:
    """List the contexts of the context file; a star marks the current one."""
    with reported():
        stored = contexts.load()
    if not stored.contexts:
        say(f"no context is defined in {contexts.path() or 'a context file: there is no home folder'}")
        return
    shown = new_table("context", "current", "server", "credentials")
    for name, context in sorted(stored.contexts.items()):
        given = ", ".join(field for field in ("ca", "cert", "key", "token_file") if getattr(context, field))
        add(shown, name, "*" if name == stored.current else "", context.server, given)
    console().print(shown)


@context_app.command("use")
def context_use(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the context.", autocompletion=context_names)],
) -> None:
    """Make a context the current one, which holds for commands without --server, --context and their variables."""
    if not name:
        fail(INVALID, "NAME must be the name of a context; got an empty one")
    with reported():
        file = contexts.use(name)
    say(f"{file}: the current context is {name}")
