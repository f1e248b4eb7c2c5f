"""A process that only serves leaves compiler and sharding out, and computes what it would compute with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.models_for_tests import build
from tieredkv import lean

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("sympy", "triton", "torch._inductor", "torch.distributed.tensor", "torch._dynamo.symbolic_convert")
_SERVING = f"""
import sys
from tieredkv import lean
lean.import_transformers()
import torch, transformers
from tieredkv.config import Config
from tieredkv.models import load_model, stock_logits
model = load_model(Config.load({{"model": sys.argv[1], "dtype": "float32", "device": "cpu"}}).model, 16).model
torch.save(stock_logits(model, [5, 6, 7]), sys.argv[2])
print([name for name in {LEFT_OUT} if name in sys.modules])
print(torch._dynamo.__name__, torch._dynamo.allow_in_graph(len) is len)
print(torch.distributed.is_available())
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build("llama", tmp_path_factory.mktemp("llama"))


def run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, cwd=ROOT, timeout=120
    )
    return done.stdout.splitlines()


def test_the_same_logits_without_what_serving_needs_not(folder, tmp_path):
    lines = run(_SERVING, str(folder), str(tmp_path / "logits.pt"))
    assert lines[0] == "[]"
    assert lines[1] == "torch._dynamo True"
    # Only transformers was told that there is none.
    assert lines[2] == str(torch.distributed.is_available())
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.inference_mode():
        expected = model(torch.tensor([[5, 6, 7]])).logits[0]
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_whoever_asks_the_stand_in_for_more_gets_the_real_module(tmp_path):
    package = tmp_path / "compiler"
    package.mkdir()
    (package / "__init__.py").write_text("print('loaded'); known = 'real'; more = 1; from compiler import part")
    (package / "part.py").write_text("print('part')")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from tieredkv import lean;"
        "lean._postpone('compiler', known='stand-in'); import compiler; print(compiler.known);"
        "print(hasattr(compiler, '__wrapped__')); print(compiler.more, compiler.known)"
    )
    assert run(code, str(tmp_path)) == ["stand-in", "False", "loaded", "part", "1 real"]


def test_where_leaving_out_fails_everything_is_imported():
    code = (
        "import sys; from tieredkv import lean;"
        "lean._scanning_once = None; lean.import_transformers();"
        "from transformers.utils.import_utils import is_torch_distributed_available as found;"
        "import torch; print(found() == torch.distributed.is_available(), type(torch._dynamo).__name__)"
    )
    assert run(code) == ["True module"]


def test_a_model_made_quickly_has_the_numbers_of_its_files(folder):
    def load() -> dict[str, torch.Tensor]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        return {**dict(model.named_parameters()), **dict(model.named_buffers())}

    expected = load()
    with lean.quick_construction():
        quick = load()
    assert quick.keys() == expected.keys()
    assert all(torch.equal(quick[name], tensor) and not quick[name].is_meta for name, tensor in expected.items())


def test_layers_made_outside_are_filled_as_ever():
    with lean.quick_construction():
        assert torch.nn.Linear(8, 8).weight.abs().sum() > 0
        assert torch.arange(3).device.type == "cpu"
    assert torch.arange(3, device="meta").is_meta


def test_device_contexts_reach_arange_again_afterwards():
    code = (
        "import torch; from tieredkv import lean\n"
        "with lean.quick_construction(), torch.device('meta'): torch.zeros(3)\n"
        "with torch.device('meta'): print(torch.arange(3).device)"
    )
    assert run(code) == ["meta"]
