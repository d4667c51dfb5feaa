"""Measured upper limits of this machine: matrix products with a model's shapes, copies, attention kernels.

A training step is compared with these measurements and not with a data sheet. All rates are medians of several calls
on random numbers. Outputs are allocated before the measurement.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gptexp.config.rules import missing_kernel
from gptexp.config.schema import ModelConfig
from gptexp.machine.device import is_out_of_memory
from gptexp.model.attention import Masks, build_block_mask, build_masks, causal_attention
from gptexp.model.kernels import KERNELS, attention_kernel
from gptexp.model.shapes import linear_layers

MEASURE_S = 0.3  # minimum duration of one measurement in seconds
COPY_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}  # far more than the size of any cache


def median_s(call: Callable[[], Any]) -> float:
    """Median of the seconds of one `call`, including its work on the device."""
    from torch.utils.benchmark import Timer  # takes a second

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=MEASURE_S).median)


def gemm_shapes(m: ModelConfig, tokens: int) -> dict[str, tuple[int, int, int, int]]:
    """The linear layers of a forward pass over `tokens`: name -> (rows, inner, columns, number of layers)."""
    return {name: (tokens, inputs, outputs, count) for name, (inputs, outputs, count) in linear_layers(m).items()}


def gemm_rates(m: ModelConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> dict[str, float]:
    """FLOP/s of each layer's three products: output, gradient of the input, gradient of the weight.

    "model" is the FLOP/s of all products of a training step together.
    """
    rates = {}
    all_flops = all_seconds = 0.0
    for name, (rows, inner, columns, count) in gemm_shapes(m, tokens).items():
        seconds = _products_s(rows, inner, columns, device, dtype)
        flops = 3 * 2 * rows * inner * columns
        rates[name] = flops / seconds
        all_flops, all_seconds = all_flops + count * flops, all_seconds + count * seconds
    return {**rates, "model": all_flops / all_seconds}


def _products_s(rows: int, inner: int, columns: int, device: torch.device, dtype: torch.dtype) -> float:
    """Seconds of a linear layer's product in the forward pass and its two products in the backward pass."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    x, weight, grad = random(rows, inner), random(columns, inner), random(rows, columns)
    out, grad_x, grad_weight = torch.empty_like(grad), torch.empty_like(x), torch.empty_like(weight)
    return (
        median_s(lambda: torch.mm(x, weight.T, out=out))
        + median_s(lambda: torch.mm(grad, weight, out=grad_x))
        + median_s(lambda: torch.mm(grad.T, x, out=grad_weight))
    )


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a copy that is larger than any cache."""
    source = torch.ones(COPY_BYTES.get(device.type, COPY_BYTES["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_s(lambda: target.copy_(source))


def attention_ms(
    m: ModelConfig, batch: int, seq_len: int, device: torch.device, dtype: torch.dtype
) -> dict[str, float | None]:
    """Milliseconds of one layer's causal attention, forward and backward, by kernel; None if it is not available."""
    masks = build_masks(seq_len, m.window, None, torch.empty(0, device=device, dtype=dtype))
    attend = partial(causal_attention, scale=None, masks=masks)
    forward_backward = _attention(m, batch, seq_len, device, dtype, torch.randn, attend)
    measured: dict[str, float | None] = {}
    for name in KERNELS:
        if missing_kernel(name, device.type):
            measured[name] = None
            continue
        with attention_kernel(name, asked=True, device=device.type), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about each reason why a kernel is not available
            try:
                measured[name] = 1e3 * median_s(forward_backward)
            except RuntimeError as error:
                if "No available kernel" not in str(error) and not is_out_of_memory(error):
                    raise
                measured[name] = None
    return measured


def mask_ms(
    m: ModelConfig, batch: int, seq_len: int, device: torch.device, dtype: torch.dtype, flex: bool
) -> tuple[float, float]:
    """Milliseconds of one layer's attention, forward and backward: across documents, and within them.

    Draws no random numbers, so that a run that measures it trains as one that does not.
    """
    attention: Callable[..., Tensor] = causal_attention
    build: Callable[..., Masks | None] = build_masks
    if flex:
        attention, build = torch.compile(causal_attention, fullgraph=True, dynamic=False), build_block_mask
    like = torch.empty(0, device=device, dtype=dtype)

    def milliseconds(documents: Tensor | None) -> float:
        attend = partial(attention, scale=None, masks=build(seq_len, m.window, documents, like))
        return 1e3 * median_s(_attention(m, batch, seq_len, device, dtype, torch.ones, attend))

    return milliseconds(None), milliseconds(torch.zeros((batch, seq_len), dtype=torch.int64, device=device))


def _attention(
    m: ModelConfig,
    batch: int,
    seq_len: int,
    device: torch.device,
    dtype: torch.dtype,
    numbers: Callable[..., Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Callable[[], None]:
    """A call of a layer's attention `attend` and its backward pass on `numbers`, such as `torch.randn`."""
    heads = (m.n_head, m.kv_heads, m.kv_heads)
    # Queries, keys and values are parts of one tensor, with dimensions in the order of a layer.
    of_all = numbers((batch, seq_len, sum(heads), m.head_size), device=device, dtype=dtype, requires_grad=True)
    q, k, v = (part.transpose(1, 2) for part in of_all.split(heads, 2))
    grad = numbers((batch, seq_len, m.n_head, m.head_size), device=device, dtype=dtype).transpose(1, 2)

    def forward_backward() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), grad)

    return forward_backward
