"""What a process that only serves leaves out of torch and transformers while it loads a model.

transformers' modelling code pulls in torch's compiler (with Triton and SymPy) for a few decorators that mark functions for
it, and torch's sharded tensors to see whether a tensor is one. Serving compiles nothing and shards nothing, and doing
without them takes more than a second and 140 MiB off a start. So:

- `torch._dynamo` is a stand-in whose decorators return what they get; whoever asks it for anything else gets the real one.
- transformers is told that torch was built without `torch.distributed`, which it supports.
- the folder of models is scanned once, not twice.
- a model is made without numbers that its checkpoint replaces.

Knows no model. Invariant: nothing here changes what a model computes. `import_transformers` changes how transformers behaves
for everybody in this process, so only programs call it that do nothing else; as a library we import it as it is.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

logger = logging.getLogger(__name__)

_COMPILER = "torch._dynamo"
# What every model needs; the rest of transformers comes when it is asked for.
_NEEDED = ("transformers.models", "transformers.modeling_utils", "transformers.masking_utils")


def import_transformers() -> None:
    """Import torch and transformers' modelling code without compiler and sharding, or as they are where that fails.

    Does nothing when transformers is there already.
    """
    if "transformers" in sys.modules:
        return
    import torch

    try:
        _postpone(_COMPILER, allow_in_graph=_unchanged, assume_constant_result=_unchanged, disable=_disable)
        utils = importlib.import_module("transformers.utils.import_utils")
        _deny_distributed(utils, torch.distributed)
        with _scanning_once(utils):
            for name in _NEEDED:
                importlib.import_module(name)
    # Another version of either may want what is left out, and say so in any way.
    except Exception as error:
        logger.info("torch and transformers are imported in full: %s: %s", type(error).__name__, error)
        for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
            del sys.modules[name]
        stand_in = sys.modules.get(_COMPILER)
        if isinstance(stand_in, _Postponed):
            stand_in.load()


class _Postponed(ModuleType):
    """A module that runs its own code only when asked for a name that it does not have yet."""

    _lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        # Names of this kind are asked for by whoever walks over all modules.
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Become the real module."""
        with _Postponed._lock:
            if type(self) is not _Postponed or self.__spec__ is None or self.__spec__.loader is None:
                return
            self.__class__ = ModuleType  # type: ignore[assignment]
            self.__spec__.loader.exec_module(self)


def _postpone(name: str, **known: Callable[..., Any]) -> None:
    """Put a stand-in that has the `known` names where the module `name` is looked for, unless that is there already."""
    parent, _, child = name.rpartition(".")
    spec = importlib.util.find_spec(name)
    if spec is None or name in sys.modules:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Postponed
    module.__dict__.update(known)
    sys.modules[name] = module
    if parent:
        setattr(sys.modules[parent], child, module)


def _unchanged(function: Any) -> Any:
    return function


def _disable(function: Any = None, *_: Any, **__: Any) -> Any:
    """`torch._dynamo.disable`, as a decorator with or without arguments."""
    return function if function is not None else lambda decorated: decorated


def _deny_distributed(utils: ModuleType, distributed: Any) -> None:
    """Let transformers find, and remember, that there is no `torch.distributed`; others still find it."""
    found = distributed.is_available
    distributed.is_available = lambda: False
    try:
        utils.is_torch_distributed_available()
    finally:
        distributed.is_available = found


@contextlib.contextmanager
def _scanning_once(utils: ModuleType) -> Iterator[None]:
    """Name a package by its folder when its files are scanned: so transformers itself did, and remembers what it found."""
    scan = utils.define_import_structure

    def scan_folder(module_path: Any, prefix: str | None = None) -> Any:
        path = Path(module_path)
        return scan(path.parent if path.name == "__init__.py" else module_path, prefix)

    utils.define_import_structure = scan_folder  # type: ignore[attr-defined]
    try:
        yield
    finally:
        utils.define_import_structure = scan  # type: ignore[attr-defined]


@contextlib.contextmanager
def quick_construction() -> Iterator[None]:
    """What a model's constructor does on torch's "meta" device, which holds no numbers, and what costs time for nothing:
    layers are not filled with random numbers, and `torch.arange` makes real ones.

    torch computes both through its reference in Python otherwise, for which it imports SymPy. A constructor that mixes such
    numbers with the device's own raises `RuntimeError`.
    """
    import torch

    kinds: tuple[Any, ...] = (torch.nn.Embedding, torch.nn.Linear)
    resets = [kind.reset_parameters for kind in kinds]
    arange: Callable[..., Any] = torch.arange

    def quiet(reset: Callable[[Any], None]) -> Callable[[Any], None]:
        return lambda module: None if module.weight.is_meta else reset(module)

    def real_arange(*arguments: Any, device: Any = None, **more: Any) -> Any:
        return arange(*arguments, device="cpu" if device is None else device, **more)

    # The first use of a device context notes for good which functions make tensors: it has to see torch's own.
    with torch.device("meta"):
        torch.empty(0)
    for kind, reset in zip(kinds, resets, strict=True):
        kind.reset_parameters = quiet(reset)
    torch.arange = real_arange
    try:
        yield
    finally:
        torch.arange = arange
        for kind, reset in zip(kinds, resets, strict=True):
            kind.reset_parameters = reset
