"""The commands as one typer application: `tieredkv serve [MODEL]`, and those beside it.

Flags win over `TIEREDKV_*` variables, those over the file. Nothing heavy is imported before a command runs, and of the
commands' own modules only those that are asked for: a server starts without them.
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from typing import Annotated, Any

import typer

from tieredkv import __version__
from tieredkv.checkpoint import default_store
from tieredkv.cli.options import config_option, given_settings, option, settings_fields, with_parameters
from tieredkv.config import Config
from tieredkv.runtime import maybe_reexec

SERVE = "serve"

SERVE_HELP = """Serve MODEL behind an OpenAI-style API.

Every prefix that was computed stays in a pool of KV blocks, and later requests that start with it skip that part.

[bold]Examples[/bold]

  tieredkv serve                                   the default model on 127.0.0.1:8000
  tieredkv serve ./Qwen3-0.6B --port 9000          a local Hugging Face folder
  tieredkv serve model.gguf --kv-cache-memory 8GiB a GGUF file with a pool of 8 GiB
  tieredkv serve --disk-path /nvme/kv --disk-size 200GiB   evicted blocks survive there, also a restart
  tieredkv serve --config configs/default.toml     settings from a file; flags win over it

Each flag is also a key of the file and a variable: --max-num-seqs, max_num_seqs, TIEREDKV_MAX_NUM_SEQS.
"""


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tieredkv {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _serve(**given: Any) -> int:
    file = given.pop("config")
    config = Config.load(
        given_settings(given),
        file=file,
        environ=os.environ,
        source="command line",
        defaults={"disk_path": str(default_store())},
    )
    # Before torch is loaded: the allocator and the OpenMP runtime can only be chosen at the start of a process.
    maybe_reexec(sys.argv)
    # What imports make stays: looking for garbage meanwhile takes 0.4 s and finds none. The server turns it on again.
    gc.disable()
    try:
        from tieredkv.server.main import serve

        return serve(config)
    finally:
        gc.enable()


def _serve_parameters() -> list[inspect.Parameter]:
    """MODEL, --config, then one flag per setting in the order of the config module."""
    parameters = []
    for section, field in settings_fields():
        if field.name == "model":
            argument = typer.Argument(metavar="MODEL", help=f"{field.metadata['doc']} Default: {field.default}.")
            kind: Any = Annotated[str | None, argument]
            parameters.append(inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind))
            parameters.append(config_option())
        else:
            parameters.append(option(section, field))
    return parameters


def make_app(command: str | None = None) -> typer.Typer:
    """The application. Where `command` is "serve" it knows no other one, which takes half a second less to make."""
    app = typer.Typer(
        name="tieredkv",
        help="A tiered KV cache service for LLM inference.",
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    app.callback(invoke_without_command=True)(_root)
    app.command(SERVE, help=SERVE_HELP)(with_parameters(_serve, _serve_parameters()))
    if command == SERVE:
        return app
    from tieredkv.cli import admin, bench, preload, simulate, store, transport

    app.command("preload", help=preload.HELP)(with_parameters(preload.preload, preload.parameters()))
    app.command("inspect")(store.inspect_store)
    app.command("verify")(store.verify_store)
    app.command("export", help=transport.EXPORT_HELP)(transport.export_prefixes)
    app.command("import", help=transport.IMPORT_HELP)(transport.import_prefixes)
    app.add_typer(admin.app)
    app.add_typer(bench.app)
    app.command("simulate", help=simulate.HELP)(simulate.simulate)
    return app
