"""The command line: `tieredkv serve [MODEL]`, `tieredkv inspect DIR`, `tieredkv verify DIR`.

One flag per setting, made from `tieredkv.config`, so names, defaults and descriptions are written once. Flags win over
`TIEREDKV_*` variables, those over the file. Bad input is one line on stderr and exit code 2. Nothing heavy is imported
before a command runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from tieredkv import __version__
from tieredkv.cli import simulate, store
from tieredkv.config import Config, format_size
from tieredkv.errors import ConfigError, StorageError, UnsupportedModelError
from tieredkv.runtime import maybe_reexec

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
# Typer brings its own copy of click or uses the installed one, depending on its version: take the class from typer.
_UsageError: Any = typer.BadParameter.__base__
PANELS = {
    "model": "Model",
    "cache": "KV block pool",
    "tiers": "Tiers below the device",
    "scheduler": "Scheduling",
    "server": "HTTP server",
    "admin": "Admin API",
}

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

app = typer.Typer(
    name="tieredkv",
    help="A tiered KV cache service for LLM inference.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tieredkv {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
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
        {key: value for key, value in given.items() if value not in (None, [])},
        file=file,
        environ=os.environ,
        source="command line",
        defaults={"disk_path": str(store.default_store())},
    )
    # Before torch is loaded: the allocator and the OpenMP runtime can only be chosen at the start of a process.
    maybe_reexec(sys.argv)
    from tieredkv.server.main import serve

    return serve(config)


def _option(section: str, field: dataclasses.Field[Any]) -> inspect.Parameter:
    """The flag of one setting. Values stay text: `Config.load` converts and checks them."""
    flag = "--" + field.name.replace("_", "-")
    notes = [str(field.metadata["doc"])]
    if "choices" in field.metadata:
        notes.append(f"One of: {', '.join(map(str, field.metadata['choices']))}.")
    kind: Any = str | None
    default: Any = field.default
    if isinstance(default, bool):
        kind = bool | None
        notes.append(f"Default: {'on' if default else 'off'}.")
        flag = f"{flag}/--no-{flag[2:]}"
    elif isinstance(default, tuple):
        kind = list[str] | None
        notes.append("May be repeated.")
    elif default is not None:
        notes.append(f"Default: {format_size(default) if field.metadata.get('size') else default}.")
    option = typer.Option(
        flag, help=" ".join(notes), show_default=False, rich_help_panel=PANELS[section], metavar=_metavar(field)
    )
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def _metavar(field: dataclasses.Field[Any]) -> str | None:
    if isinstance(field.default, bool):
        return None
    if field.metadata.get("size"):
        return "SIZE"
    return "NUMBER" if isinstance(field.default, int | float) or "low" in field.metadata else "TEXT"


def _signature() -> inspect.Signature:
    """MODEL, --config, then one flag per setting in the order of the config module."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = []
    for section in dataclasses.fields(Config):
        for field in dataclasses.fields(_section(section)):
            if field.name == "model":
                argument = typer.Argument(metavar="MODEL", help=f"{field.metadata['doc']} Default: {field.default}.")
                parameters.append(
                    inspect.Parameter("model", keyword, default=None, annotation=Annotated[str | None, argument])
                )
            else:
                parameters.append(_option(section.name, field))
    file = typer.Option(
        "--config", metavar="FILE", envvar="TIEREDKV_CONFIG", help="TOML file with settings; see configs/default.toml."
    )
    parameters.insert(1, inspect.Parameter("config", keyword, default=None, annotation=Annotated[Path | None, file]))
    return inspect.Signature(parameters)


def _section(field: dataclasses.Field[Any]) -> type[Any]:
    factory = field.default_factory
    if not isinstance(factory, type):
        raise TypeError(f"Config.{field.name} has no dataclass behind it")
    return factory


def _command() -> Callable[..., int]:
    def serve(**given: Any) -> int:
        return _serve(**given)

    signature = _signature()
    serve.__signature__ = signature  # type: ignore[attr-defined]
    serve.__annotations__ = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    return serve


app.command("serve", help=SERVE_HELP)(_command())
app.command("inspect")(store.inspect_store)
app.command("verify")(store.verify_store)
app.command("simulate", help=simulate.HELP)(simulate.simulate)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code = app(args=argv, prog_name="tieredkv", standalone_mode=False)
    except _UsageError as error:
        return _complain(error.format_message())
    except (ConfigError, StorageError, UnsupportedModelError) as error:
        return _complain(str(error))
    except (typer.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return code if isinstance(code, int) else 0


def _complain(message: str) -> int:
    print(f"tieredkv: error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_BAD_INPUT
