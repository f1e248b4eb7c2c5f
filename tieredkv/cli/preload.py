"""`tieredkv preload FILE`: compute prompts straight into a store, without a server, or say what that would take.

Turns flags into a plan and its outcome into a table or JSON. Knows files, the terminal and the order of the steps; how
prompts become blocks is the business of `preload_plan` and `preloader`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tieredkv.checkpoint import default_store
from tieredkv.cli.options import config_option, given_settings, option, settings_fields
from tieredkv.cli.preload_report import show
from tieredkv.config import Config, format_size, parse_size
from tieredkv.errors import ConfigError
from tieredkv.runtime import maybe_reexec

if TYPE_CHECKING:
    from tieredkv.models import LoadedModel
    from tieredkv.preload_plan import Entry, Plan
    from tieredkv.preloader import Preloader, Progress

EXIT_INCOMPLETE = 1
HELP = """Compute the prompts of FILE into a store, so that servers with this store and model never compute them.

FILE holds JSON lines: prompt (text), messages or tokens, and where wanted name, pin, ttl, cache_salt, tier.
A prefix that several prompts share is computed once; what is stored already is not computed again, so a run that was
stopped goes on where it was when it is started again.

[bold]Examples[/bold]

  tieredkv preload prompts.jsonl --model ./Qwen3-0.6B --disk-path /nvme/kv
  tieredkv preload prompts.jsonl --dry-run --verbose          what would be computed, shared and stored
  tieredkv preload --from-log requests.jsonl --budget 20GiB   what a log asks for most, up to 20 GiB
  tieredkv preload --from-log requests.jsonl --budget 20GiB --output prompts.jsonl   only choose

Exit code 1 if not all of it is stored at the end.
"""
_SECTIONS = ("model", "cache", "tiers")
_OTHERS = ("max_num_batched_tokens", "api_key", "log_level")
_LEFT_OUT = ("served_model_name", "enable_prefix_caching", "restore", "restore_timeout", "retention_budget")


def parameters() -> list[inspect.Parameter]:
    """FILE, the flags of this command, then those of the settings that it obeys."""

    def make(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
        return inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
        )

    text = str | None
    found = [
        make("file", Path | None, None, typer.Argument(metavar="FILE", help="JSON lines, one prompt each.")),
        make("from_log", Path | None, None, typer.Option("--from-log", help="Request log to choose prefixes from.")),
        make("budget", text, None, typer.Option("--budget", metavar="SIZE", help="Most bytes of blocks to choose.")),
        make("output", Path | None, None, typer.Option("--output", help="Write the choice there; compute nothing.")),
        make(
            "min_hits",
            int,
            2,
            typer.Option("--min-hits", min=1, help="Least requests of the log that ask for a block."),
        ),
        make("dry_run", bool, False, typer.Option("--dry-run", help="Say what would be done.")),
        make("verbose", bool, False, typer.Option("--verbose", help="A line for each prompt.")),
        make("as_json", bool, False, typer.Option("--json", help="Print JSON.")),
        config_option(),
    ]
    for section, field in settings_fields():
        if field.name in _OTHERS or (section in _SECTIONS and field.name not in _LEFT_OUT):
            found.append(option(section, field))
    return found


def preload(**given: Any) -> int:
    """The command."""
    file, log, output = given["file"], given["from_log"], given["output"]
    if (file is None) == (log is None):
        raise ConfigError("give a file of prompts, or --from-log with a request log", key="preload")
    if (given["budget"] is None) != (log is None):
        raise ConfigError("--from-log and --budget belong together", key="budget")
    if output is not None and log is None:
        raise ConfigError("--output is for what --from-log chooses", key="output")
    try:
        budget_nbytes = parse_size(given["budget"]) if given["budget"] is not None else 0
    except ValueError as error:
        raise ConfigError(f"{error}, got {given['budget']!r}", key="budget") from None
    config = _load_config(given)
    if file is not None:
        from tieredkv.server.warm import check_prompt_file

        # What is wrong with the file is said before the model is loaded.
        check_prompt_file(file)
    maybe_reexec(sys.argv)
    run = _Run(config, verbose=given["verbose"], as_json=given["as_json"])
    with contextlib.ExitStack() as stack:
        if log is not None:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="tieredkv-")) if output is None else ""
            file = output or Path(scratch) / "prompts.jsonl"
            run.choose(log, file, budget_nbytes, given["min_hits"])
            if output is not None:
                return run.finish(0)
        return run.finish(run.preload(file, dry_run=given["dry_run"]))


def _load_config(given: dict[str, Any]) -> Config:
    """The settings; the size of a store that exists stays what it is unless said otherwise."""
    from tieredkv.preloader import settings_for

    defaults: dict[str, Any] = {"disk_path": str(default_store()), "host_memory": 0}

    def load() -> Config:
        return Config.load(
            given_settings(given),
            file=given["config"],
            environ=os.environ,
            source="command line",
            defaults=defaults,
        )

    directory = _directory(load())
    with _reading(directory) as found:
        if found is not None:
            defaults["disk_size"] = found.usage().capacity_nbytes
    return settings_for(load())


def _directory(config: Config) -> Path:
    return Path(config.tiers.disk_path or default_store()).expanduser()


@contextlib.contextmanager
def _reading(directory: Path) -> Iterator[Any]:
    """The store in `directory`, for reading; None if there is none."""
    from tieredkv.storage.disk import DiskStore
    from tieredkv.storage.medium import DATA

    if not (directory / DATA).exists():
        yield None
        return
    found = DiskStore.open(directory, readonly=True)
    try:
        yield found
    finally:
        found.close()


class _Run:
    """One run of the command: the model, what was planned, what came of it."""

    def __init__(self, config: Config, *, verbose: bool, as_json: bool) -> None:
        self._config = config
        self._verbose = verbose
        self._as_json = as_json
        self._console = Console(stderr=True)
        self._result: dict[str, Any] = {}
        self._loaded: LoadedModel | None = None

    @property
    def _model(self) -> LoadedModel:
        if self._loaded is None:
            from tieredkv.models import load_model
            from tieredkv.server.display import LoadProgress

            with LoadProgress(self._console) as progress:
                self._loaded = load_model(self._config.model, self._config.cache.block_size, progress.update)
        return self._loaded

    def choose(self, log: Path, output: Path, budget_nbytes: int, min_hits: int) -> None:
        """Write the prefixes of a request log that are worth keeping to `output`."""
        from tieredkv.preload_plan import block_cost
        from tieredkv.request_log import choose_prefixes
        from tieredkv.server.warm import encode_logged

        layout = self._model.layout
        with self._console.status("Reading the log"):
            report = choose_prefixes(
                log,
                output,
                lambda body: encode_logged(self._model.tokenizer, body),
                block_size=layout.block_size,
                block_nbytes=block_cost(layout.block_nbytes, layout.block_size),
                budget_nbytes=budget_nbytes,
                min_hits=min_hits,
            )
        self._result["log"] = dataclasses.asdict(report)

    def preload(self, file: Path, *, dry_run: bool) -> int:
        """Plan, and unless it is a dry run compute; returns the exit code."""
        from tieredkv import preload_plan
        from tieredkv.server.warm import check_prompt_file, deferred_prompts

        model, config = self._model, self._config
        layout, namespace = model.layout, model.namespace.digest
        prompts = deferred_prompts(file, check_prompt_file(file), model.tokenizer, config.server.api_key)
        directory = _directory(config)
        with _reading(directory) as found, self._console.status("") as status:
            plan = preload_plan.make_plan(
                file,
                prompts,
                namespace=namespace,
                block_size=layout.block_size,
                vocab_size=model.vocab_size,
                max_model_len=min(model.max_model_len, config.model.max_model_len or model.max_model_len),
                look_up=found.longest_prefix if found is not None else lambda _: 0,
                progress=lambda done: status.update(f"Reading prompts: {done:,} of {len(prompts):,}"),
            )
        room = preload_plan.room_blocks(config.tiers.disk_size, layout.block_nbytes, layout.block_size)
        plan.admit(room)
        self._describe(plan, layout.block_nbytes)
        if dry_run:
            left_out = [(entry, entry.num_stored) for entry in plan.entries if not entry.fits]
            self._result["not_stored"] = [_entry_as_json(entry, stored, plan) for entry, stored in left_out]
            return EXIT_INCOMPLETE if left_out else 0
        if any(entry.num_new or entry.pin for entry in plan.entries):
            self._compute(plan, room)
        with _reading(directory) as found:
            look_up = found.longest_prefix if found is not None else lambda _: 0
            stored = [
                preload_plan.num_stored_blocks(entry, namespace, layout.block_size, look_up) for entry in plan.entries
            ]
        lacking = [(entry, num) for entry, num in zip(plan.entries, stored, strict=True) if num < entry.num_blocks]
        self._result["not_stored"] = [_entry_as_json(entry, num, plan) for entry, num in lacking]
        refused = any(pin["outcome"] == "refused" for pin in self._result.get("pins", ()))
        return EXIT_INCOMPLETE if lacking or refused or self._result.get("problem") else 0

    def _compute(self, plan: Plan, room: int) -> None:
        from tieredkv.build import build_core, load_runner
        from tieredkv.preloader import Preloader
        from tieredkv.server.display import LoadProgress

        with LoadProgress(self._console) as loading:
            runner = load_runner(self._config, loading.update, self._model)
        core = build_core(runner, self._config)
        saved = False
        try:
            with self._bar() as report:
                preloader = Preloader(core, self._model.layout.block_nbytes, report)
                pins = preloader.pin(entry for entry in plan.entries if entry.pin and entry.fits)
                self._fill(preloader, plan, room)
                pins = preloader.look_again(pins)
        finally:
            saved = core.close(self._config.server.drain_timeout)
        progress = preloader.progress
        self._result |= {
            "computed_tokens": progress.num_tokens_computed,
            "saved_blocks": progress.num_blocks_saved,
            "saved_nbytes": progress.nbytes_saved,
            "seconds": round(progress.seconds, 3),
            "tokens_per_s": round(progress.num_tokens_computed / progress.seconds, 1) if progress.seconds else 0.0,
            "pins": [dataclasses.asdict(each) for each in pins],
            "problem": preloader.problem or (None if saved else "not everything could be saved in time"),
        }

    def _fill(self, preloader: Preloader, plan: Plan, room: int) -> None:
        """Compute what fits. Compressed blocks leave room for more than was promised: fill that as well."""
        done: set[int] = set()
        while preloader.problem is None:
            preloader.touch(entry for entry in plan.entries if entry.fits and not entry.num_new)
            todo = [entry for entry in plan.entries if entry.fits and entry.num_new and id(entry) not in done]
            preloader.run(todo)
            done.update(map(id, todo))
            if all(entry.fits for entry in plan.entries):
                return
            measured = preloader.measured_room(self._config.tiers.disk_size)
            if measured <= room:
                return
            room = measured
            plan.admit(room)

    @contextlib.contextmanager
    def _bar(self) -> Iterator[Callable[[Progress], None]]:
        columns = (TextColumn("Computing"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        with Bar(*columns, console=self._console, transient=True, disable=not self._console.is_terminal) as bar:
            task = bar.add_task("preload", total=None, text="")

            def report(now: Progress) -> None:
                rate = now.num_tokens_computed / now.seconds if now.seconds else 0.0
                text = (
                    f"{now.num_tokens_done:,} of {now.num_tokens:,} tokens, {rate:,.0f} tokens/s, "
                    f"{format_size(now.nbytes_saved)} saved"
                )
                bar.update(task, completed=now.num_tokens_done, total=now.num_tokens, text=text)

            yield report

    def _describe(self, plan: Plan, block_nbytes: int) -> None:
        size = plan.block_size
        self._result |= {
            "prompts": len(plan.entries),
            "prompts_below_a_block": sum(not entry.num_blocks for entry in plan.entries),
            "prompt_tokens": sum(entry.num_tokens for entry in plan.entries),
            "block_size": size,
            "block_nbytes": block_nbytes,
            "tokens": plan.num_unique_blocks * size,
            "blocks": plan.num_unique_blocks,
            "shared_tokens": sum(entry.num_shared for entry in plan.entries) * size,
            "stored_blocks": plan.num_stored_blocks,
            "new_tokens": plan.num_new_blocks * size,
            "new_blocks": plan.num_new_blocks,
            "new_nbytes": plan.num_new_blocks * block_nbytes,
        }
        if self._verbose:
            ordered = sorted(plan.entries, key=lambda entry: entry.source.number)
            self._result["lines"] = [
                _entry_as_json(entry, entry.num_stored, plan)
                | {"shared_tokens": entry.num_shared * size, "new_tokens": entry.num_new * size}
                for entry in ordered
            ]

    def finish(self, code: int) -> int:
        """Print the result; returns `code`."""
        if self._as_json:
            print(json.dumps(self._result | {"complete": code == 0}, indent=2, default=str))
        else:
            show(self._result)
        return code


def _entry_as_json(entry: Entry, num_stored: int, plan: Plan) -> dict[str, Any]:
    reason = entry.error or (None if entry.fits else "it does not fit into the store")
    return {
        "line": entry.source.number,
        "name": entry.name,
        "tokens": entry.num_tokens,
        "stored_tokens": num_stored * plan.block_size,
        "reason": reason,
    }
