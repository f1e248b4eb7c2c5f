"""Parts "decode" and "prefill": what the attention kernels make of the device, beside what the device can do.

Decode is bound by memory: bytes of keys and values per second, as a share of a large copy's bytes read and written. As in a
model, one call follows another, each over a layer of its own, so that nothing is found in the second-level cache; the calls
are captured in a graph, so that nothing waits for the host. Prefill is bound by arithmetic: operations per second, as a
share of a matrix product's, and beside torch's own attention over contiguous keys and values.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_check.device import times_s
from benchmarks.gpu_check.report import Row, share_row
from benchmarks.gpu_check.worker import Context
from tieredkv.kernels.paged_decode import launch_for, paged_decode
from tieredkv.kernels.paged_prefill import paged_prefill

DECODE_TARGET, PREFILL_TARGET = 0.85, 0.9
# From here on the target for decode holds: smaller batches do not fill the device.
TARGET_BATCH, TARGET_CONTEXT = 8, 8192


def copy_rate(context: Context) -> float:
    """Bytes per second that a large copy within the device reads and writes."""
    source = torch.randn(context.sizes.copy_nbytes // 4, device=context.device.torch)
    target = torch.empty_like(source)
    seconds = statistics.median(times_s(context.device, lambda: target.copy_(source), context.sizes.repeats))
    return 2 * source.nbytes / seconds


def decode(context: Context) -> Iterator[Row]:
    """Every batch with every context that fits into the memory set aside."""
    sizes, device = context.sizes, context.device
    rate = copy_rate(context)
    yield Row("decode", "copy within the device", f"{rate / 1e12:.2f} TB/s", data={"bytes_per_s": rate})
    dtype: torch.dtype = getattr(torch, sizes.speed_dtype)
    token_numel = 2 * sizes.kv_heads * sizes.head_dim
    device.release()
    numel = min(sizes.pool_nbytes, device.free_nbytes() // 2) // dtype.itemsize
    memory = torch.empty(numel, dtype=dtype, device=device.torch)
    for part in torch.split(memory, 2**30):
        part.normal_()
    flush = torch.empty(sizes.flush_nbytes, dtype=torch.uint8, device=device.torch)
    for tokens in sizes.decode_contexts:
        for batch in sizes.decode_batches:
            if context.late():
                yield Row("decode", f"{batch} x {tokens} tokens", "no time left", skipped=True)
                continue
            num_blocks = batch * -(-tokens // sizes.block_size) + 1
            layer_numel = num_blocks * sizes.block_size * token_numel
            if layer_numel > numel:
                continue
            layers = min(numel // layer_numel, sizes.most_layers)
            shape = (num_blocks, layers, 2, sizes.block_size, sizes.kv_heads, sizes.head_dim)
            blocks = memory[: layers * layer_numel].view(shape)
            step = decode_step(blocks, batch, tokens, sizes.heads)
            replay = device.capture()(step)
            seconds = statistics.median(times_s(device, replay, sizes.repeats, flush.zero_)) / layers
            nbytes = batch * (tokens * token_numel + 2 * sizes.heads * sizes.head_dim) * dtype.itemsize
            share = nbytes / seconds / rate
            judged = batch >= TARGET_BATCH and tokens >= TARGET_CONTEXT
            yield share_row(
                "decode",
                f"{batch} x {tokens} tokens",
                f"{share:.2f} of copy, {nbytes / seconds / 1e12:.2f} TB/s, {seconds * 1e6:.0f} us",
                share,
                DECODE_TARGET if judged else None,
                bytes_per_s=nbytes / seconds,
                seconds=seconds,
                layers=layers,
            )


def decode_step(blocks: torch.Tensor, batch: int, tokens: int, heads: int) -> Callable[[], None]:
    """A decode of `batch` contexts of `tokens` over scattered blocks, once per layer of `blocks`."""
    num_blocks, layers, _, _, kv_heads, head_dim = blocks.shape
    device = blocks.device
    tables = (1 + torch.randperm(num_blocks - 1, device=device)).to(torch.int32).view(batch, -1)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    q = torch.randn(batch, heads, head_dim, device=device).to(blocks.dtype)
    out = torch.empty_like(q)
    launch = launch_for(q, kv_heads, tokens)
    workspace = torch.empty(launch.workspace_numel, dtype=torch.float32, device=device)

    def step() -> None:
        for layer in range(layers):
            paged_decode(
                q, blocks, layer, tables, lens, head_dim**-0.5, out=out, workspace=workspace, launch=launch
            )  # fmt: skip

    return step


def prefill(context: Context) -> Iterator[Row]:
    """Prompts, and the later part of one, each beside the device's matrix product and torch's attention."""
    sizes, device = context.sizes, context.device
    dtype: torch.dtype = getattr(torch, sizes.speed_dtype)
    a, b = (torch.randn(sizes.matmul, sizes.matmul, device=device.torch).to(dtype) for _ in range(2))
    product = 2 * sizes.matmul**3 / statistics.median(times_s(device, lambda: a @ b, sizes.repeats))
    size = f"{sizes.matmul} x {sizes.matmul} x {sizes.matmul}"
    yield Row("prefill", "matrix product", f"{product / 1e12:.0f} TFLOP/s ({size})", data={"flop_per_s": product})
    for new, cached in sizes.prefills:
        name = f"{new} tokens" + f" over {cached}" * bool(cached)
        if context.late():
            yield Row("prefill", name, "no time left", skipped=True)
            continue
        ours, theirs = prefill_times(context, new, cached, dtype)
        # Two products over the keys that each query sees.
        flop = 4 * sizes.heads * sizes.head_dim * (new * cached + new * (new + 1) / 2)
        yield share_row(
            "prefill",
            name,
            f"{theirs / ours:.2f} of SDPA, {flop / ours / 1e12:.0f} TFLOP/s, {flop / ours / product:.2f} of product",
            theirs / ours,
            PREFILL_TARGET,
            flop_per_s=flop / ours,
            of_product=flop / ours / product,
            seconds=ours,
            sdpa_s=theirs,
        )
        device.release()


def prefill_times(context: Context, new: int, cached: int, dtype: torch.dtype) -> tuple[float, float]:
    """Seconds of the kernel and of torch's attention, whichever way of calling it is faster."""
    sizes, device = context.sizes, context.device.torch
    num_blocks = -(-(new + cached) // sizes.block_size)
    shape = (num_blocks + 1, 1, 2, sizes.block_size, sizes.kv_heads, sizes.head_dim)
    blocks = torch.randn(shape, device=device).to(dtype)
    tables = (1 + torch.randperm(num_blocks, device=device)).to(torch.int32)[None]
    lens = torch.tensor([new + cached], dtype=torch.int32, device=device)
    starts = torch.tensor([0, new], dtype=torch.int32, device=device)
    q = torch.randn(new, sizes.heads, sizes.head_dim, device=device).to(dtype)
    out = torch.empty_like(q)
    scale = sizes.head_dim**-0.5
    ours = times_s(
        context.device, lambda: paged_prefill(q, blocks, 0, tables, lens, starts, scale, out=out), sizes.repeats
    )
    k, v = torch.randn(2, 1, sizes.kv_heads, new + cached, sizes.head_dim, device=device).to(dtype).unbind(0)
    wide_k, wide_v = (x.repeat_interleave(sizes.heads // sizes.kv_heads, 1) for x in (k, v))
    rows = q.transpose(0, 1)[None].contiguous()
    # With cached tokens the diagonal ends in the lower right corner, which only a bias of its own says.
    mask = {"attn_mask": causal_lower_right(new, new + cached)} if cached else {"is_causal": True}
    theirs = [
        times_s(context.device, lambda: scaled_dot_product_attention(rows, wide_k, wide_v, **mask), sizes.repeats)
    ]
    if not cached:
        grouped = times_s(
            context.device,
            lambda: scaled_dot_product_attention(rows, k, v, is_causal=True, enable_gqa=True),
            sizes.repeats,
        )
        theirs.append(grouped)
    return statistics.median(ours), min(statistics.median(times) for times in theirs)
