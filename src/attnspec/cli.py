"""The command line."""

import typer

app = typer.Typer(help="Multi-head attention with every shape checked.", no_args_is_help=True, add_completion=False)
