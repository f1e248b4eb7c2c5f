"""What the kernels' launch shapes need to know of a device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tieredkv.kernels.launch import DEFAULT_NUM_SMS


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """arch: compute capability as a number, 90 for 9.0; num_sms: streaming multiprocessors."""

    arch: int
    num_sms: int


@functools.cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Facts of a CUDA device; of an H100 for any other, so that the interpreter walks the shapes that matter."""
    if device.type != "cuda":
        return DeviceFacts(90, DEFAULT_NUM_SMS)
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(properties.major * 10 + properties.minor, properties.multi_processor_count)
