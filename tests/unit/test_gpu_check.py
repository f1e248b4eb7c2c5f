"""The check of a GPU survives what a GPU does to it: parts that fail, die, hang or come too late cost themselves only."""

from __future__ import annotations

import json
import math
import os
import sys
import zipfile

import pytest

from benchmarks.gpu_check import __main__ as script
from benchmarks.gpu_check import wheels, worker
from benchmarks.gpu_check.conductor import Conductor
from benchmarks.gpu_check.report import Row, as_json, failed, share_row, table
from benchmarks.gpu_check.sizes import FULL, PARTS, SMALL

# A worker that does what the names of its parts say.
FAKE = """
import json, os, sys, time

def say(**message):
    print(json.dumps(message), flush=True)

parts = [name for name in sys.argv[1:] if name.isidentifier()]
if "nogpu" in parts:
    say(fatal="there is no such device")
    sys.exit(1)
if "noworker" in parts:
    sys.exit(3)
say(machine={"card": "Fake 9000", "process": os.getpid()})
print("a library says something")
print("[1, 2]")
for part in parts:
    say(begin=part)
    if part == "dies":
        os._exit(7)
    if part == "hangs":
        time.sleep(60)
    if part == "late":
        say(late=part)
        break
    if part == "spoils":
        say(row={"part": part, "name": "the rest", "ok": False})
        say(fatal="illegal memory access")
        sys.exit(1)
    say(row={"part": part, "name": "a", "value": "1", "ok": True})
    say(end=part)
"""


def conduct(*parts: str, limit_s: float = 30.0, silence_s: float = 20.0) -> Conductor:
    made = Conductor([sys.executable, "-c", FAKE], parts, limit_s, silence_s=silence_s)
    made.run()
    return made


def verdicts(conductor: Conductor) -> list[tuple[str, str]]:
    return [(row.part, row.verdict) for row in conductor.rows]


def test_all_parts_run_in_one_worker():
    made = conduct("one", "two")
    assert verdicts(made) == [("one", "ok"), ("two", "ok")]
    assert made.machine["card"] == "Fake 9000"
    assert list(made.seconds) == ["one", "two"]
    assert not failed(made.rows)


@pytest.mark.parametrize(("bad", "reason"), [("dies", "status 7"), ("spoils", "illegal memory access")])
def test_a_part_that_spoils_its_process_costs_itself_only(bad, reason):
    made = conduct("one", bad, "two")
    assert verdicts(made)[0] == ("one", "ok")
    assert verdicts(made)[-1] == ("two", "ok")
    assert {verdict for part, verdict in verdicts(made) if part == bad} == {"FAILED"}
    assert any(reason in row.value for row in made.rows)
    assert failed(made.rows)


def test_a_part_that_hangs_is_stopped():
    made = conduct("hangs", "two", silence_s=0.5)
    assert verdicts(made) == [("hangs", "FAILED"), ("two", "ok")]
    assert "nothing was heard" in made.rows[0].value


def test_what_there_is_no_time_for_is_shown_as_skipped():
    assert verdicts(conduct("one", "two", limit_s=0.0)) == [("one", "skipped"), ("two", "skipped")]
    made = conduct("one", "hangs", "two", limit_s=1.0)
    assert verdicts(made) == [("one", "ok"), ("hangs", "skipped"), ("two", "skipped")]
    assert not failed(made.rows)


def test_a_worker_that_is_late_says_so():
    made = conduct("one", "late", "two", limit_s=0.6)
    assert verdicts(made)[0] == ("one", "ok")
    assert set(verdicts(made)[1:]) == {("late", "skipped"), ("two", "skipped")}


@pytest.mark.parametrize(("bad", "reason"), [("nogpu", "there is no such device"), ("noworker", "status 3")])
def test_without_a_device_every_part_fails_at_once(bad, reason):
    made = conduct("one", bad)
    assert verdicts(made) == [("one", "FAILED"), (bad, "FAILED")]
    assert all(reason in row.value for row in made.rows)


class Device:
    """Fails to synchronize when it is spoiled."""

    spoiled = False

    def release(self) -> None:
        pass

    def synchronize(self) -> None:
        if self.spoiled:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


def run(part, capsys, device=None) -> tuple[bool, list[dict]]:
    usable = worker.run_part("p", part, worker.Context(device or Device(), SMALL, math.inf))
    return usable, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_found_before_an_error_are_kept(capsys):
    def part(context):
        yield Row("p", "first", ok=True)
        raise ValueError("two\nlines")

    usable, messages = run(part, capsys)
    assert usable
    rows = [Row(**message["row"]) for message in messages if "row" in message]
    assert [(row.name, row.verdict) for row in rows] == [("first", "ok"), ("the rest", "FAILED")]
    assert rows[1].value == "ValueError: two lines"
    assert messages[-1] == {"end": "p"}


def test_a_spoiled_device_is_reported(capsys):
    device = Device()

    def part(context):
        device.spoiled = True
        yield Row("p", "first", ok=True)

    usable, messages = run(part, capsys, device)
    assert not usable
    assert any("illegal memory access" in message.get("fatal", "") for message in messages)


def test_a_part_without_rows_is_shown(capsys):
    usable, messages = run(lambda context: iter(()), capsys)
    assert usable
    assert [message["row"]["skipped"] for message in messages if "row" in message] == [True]


def test_a_part_begins_nothing_new_when_its_time_is_over():
    from benchmarks.gpu_check import attention_speed

    context = worker.Context(Device(), SMALL, deadline_s=0.0, clock=lambda: 1.0)
    assert context.late()
    assert not worker.Context(Device(), SMALL, deadline_s=2.0, clock=lambda: 1.0).late()
    assert worker.load("decode") is attention_speed.decode


def test_every_part_can_be_made():
    assert set(worker.MADE_BY) == set(PARTS)
    assert sum(1 for case in FULL.oracle if case.least_numel > 2**31) == 1
    assert {case.head_dim for case in FULL.oracle} == {64, 80, 96, 128, 256}
    assert len({case.name for case in FULL.oracle}) == len(FULL.oracle)


def test_verdicts():
    assert share_row("p", "n", "v", 0.9, 0.85).verdict == "reached"
    assert share_row("p", "n", "v", 0.8, 0.85).verdict == "missed"
    assert share_row("p", "n", "v", 0.8, None).verdict == "-"
    missed = share_row("p", "n", "v", math.nan, 0.85)
    assert missed.verdict == "missed"
    assert not failed([missed])
    assert failed([missed, Row("p", "n", ok=False)])
    assert failed([])


def test_the_table_is_aligned_and_counts():
    rows = [Row("kernels", "a", "1", ok=True), share_row("decode", "long name", "0.9", 0.9, 0.5)]
    lines = table(rows).splitlines()
    assert len({line.rindex("  ") for line in lines[:3]}) == 1
    assert lines[-1] == "1 ok, 1 reached"
    assert [row["verdict"] for row in as_json(rows)] == ["ok", "reached"]


def test_results_are_written_beside_each_other(tmp_path, capsys):
    made = conduct("one")
    script.write(tmp_path, made)
    text, document = sorted(tmp_path.iterdir(), key=lambda path: path.suffix, reverse=True)
    assert text.name.endswith("-gpu-fake-9000.txt")
    assert json.loads(document.read_text())["rows"][0]["verdict"] == "ok"
    assert capsys.readouterr().out.rstrip().endswith("1 ok")
    assert "Fake 9000" in text.read_text()


def test_nothing_is_written_where_there_was_no_device(tmp_path, capsys):
    script.write(tmp_path, conduct("one", "nogpu"))
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out.rstrip().endswith("2 FAILED")


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        script.parse(["kernel"])
    assert "unknown part 'kernel'" in capsys.readouterr().err


def test_wheels_are_installed_where_they_are_found(tmp_path, monkeypatch):
    folder = tmp_path / "wheels"
    folder.mkdir()
    name = "tieredkv_brought_along"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        info = f"{name}-1.0.dist-info"
        wheel.writestr(f"{name}.py", "VALUE = 7\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    wheels.use(folder, tmp_path / "site")
    assert __import__(name).VALUE == 7
    assert sys.modules.pop(name).__file__.startswith(str(tmp_path))

    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'site'}{os.pathsep}/elsewhere"
    with pytest.raises(FileNotFoundError):
        wheels.use(tmp_path / "site" / "nothing", tmp_path / "site")


def test_the_cuda_device_asks_torch_for_what_it_needs(monkeypatch):
    """With torch's CUDA replaced: that each call exists and is used as torch defines it shows only on a GPU."""
    from benchmarks.gpu_check import device

    class Event:
        now_ms = 0.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            Event.now_ms += 5.0
            self.at_ms = Event.now_ms

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, other: Event) -> float:
            return other.at_ms - self.at_ms

    calls = []
    cuda = device.torch.cuda
    monkeypatch.setattr(cuda, "current_device", lambda: 0)
    monkeypatch.setattr(cuda, "get_device_name", lambda which: "NVIDIA H200")
    monkeypatch.setattr(cuda, "mem_get_info", lambda which: (7, 9))
    monkeypatch.setattr(cuda, "empty_cache", lambda: calls.append("empty_cache"))
    monkeypatch.setattr(cuda, "synchronize", lambda which: calls.append("synchronize"))
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(device, "CudaCapture", lambda: "capture")
    made = device.DEVICES["cuda"]()
    assert (made.card(), made.free_nbytes(), made.capture()) == ("NVIDIA H200", 7, "capture")
    made.release()
    made.synchronize()
    assert calls == ["empty_cache", "synchronize"]
    assert device.times_s(made, lambda: None, 3) == [0.005] * 3


def test_an_error_in_one_query_is_not_hidden_by_larger_outputs_of_others():
    pytest.importorskip("triton")
    import torch

    from benchmarks.gpu_check.oracle import error_of

    expected = torch.randn(3, 2, 8, dtype=torch.float64)
    expected[1] *= 1e-4
    assert error_of(expected.float(), expected) < 1e-6
    wrong = expected.clone()
    wrong[1] = 0.0
    assert error_of(wrong, expected) == 1.0
    wrong[1, 0, 3] = math.nan
    assert math.isnan(error_of(wrong, expected))


@pytest.mark.parametrize("window", [0, 5])
def test_the_oracle_is_attention(window):
    pytest.importorskip("triton")
    import torch

    from benchmarks.gpu_check.oracle import attention

    q, k, v = torch.randn(40, 6, 8), torch.randn(50, 2, 8), torch.randn(50, 2, 8)
    own = torch.arange(10, 50)[:, None]
    seen = (torch.arange(50) <= own) & (torch.arange(50) > own - (window or 50))
    rows = [x.double().transpose(0, 1)[None] for x in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, attn_mask=seen, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(attention(q, k, v, 0.3, window, 0.0), expected[0].transpose(0, 1))
    nearly = attention(q, k, v, 0.3, window, 1e6)
    torch.testing.assert_close(nearly, expected[0].transpose(0, 1), rtol=1e-6, atol=1e-6)
