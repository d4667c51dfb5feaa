"""Cross-entropy of the head: plain, or in chunks, which keeps no logits.

The head of a small GPT-2 takes more time than its blocks, and its logits take more memory than everything else: 8,192
tokens · 50,304 ids · 4 bytes are 1.6 GB, written and read several times. The chunked loss computes a few hundred rows
of logits at a time with their loss and gradients, and then discards them. Its value is that of
`cross_entropy(hidden @ weight.T, targets)`, summed over rows in float32 for every compute type.

torch 2.13 has `F.linear_cross_entropy`, also in chunks. In bfloat16 it sums the loss in bfloat16 (10.94 where 10.85 is
right) and takes 2 to 4 times as long as the faster one of ours, in float32 1.1 to 1.3 times as long. On the left the
least CPU time in ms, forward and backward, for 50,304 ids (two cores of an Intel Xeon with AMX, torch 2.13, in turns;
torch's with the better of 512 and 1,024 rows per chunk), on the right the growth of the process in MiB:

    tokens × width      plain  chunked  fused  torch's      plain  chunked  fused  torch's
    2,048 × 32  bf16    1,467      491    215      523
                f32       688      483    413      536
    2,048 × 128 bf16      840      576    319    1,098      2,163      222    195      381
                f32     1,212      855    913    1,072                 198             233
    1,024 × 768 bf16    1,619    1,013  1,204    3,564
                f32              1,983  2,016    2,244
    8,192 × 768 bf16             9,153          26,594      (one call each)
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gptexp.model.compiler import compiled

SAFE_LOGIT = 60.0  # exp(±60) and a sum of 10^11 such values do not overflow or underflow in float32
LOG2_E = math.log2(math.e)
IGNORED = -1  # target of padding, which has no loss


def plain_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """Mean loss in nats of the rows of `hidden` (N, C) for the head `weight` (V, C) and `targets` (N,).

    `softcap` limits the logits. The gradient is that of the loss plus `z_loss` times the mean square of log Z, the
    logarithm of the softmax's denominator, which keeps the logits small (PaLM, arXiv 2204.02311, section 5); the value
    is the loss alone, comparable between runs with and without.
    """
    return cross_entropy(softcapped(F.linear(hidden, weight), softcap), targets, z_loss)


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """`plain_cross_entropy` of logits (N, V)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not z_loss:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED)
    counted = targets != IGNORED
    of_mean = counted / counted.sum()  # a row's share of the mean
    log_z, of_target = logits.logsumexp(-1), logits.gather(1, targets.clamp(min=0)[:, None])[:, 0]
    z = z_loss * (log_z.square() * of_mean).sum()
    return ((log_z - of_target) * of_mean).sum() + z - z.detach()


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """Value and gradients of `plain_cross_entropy`, without the (N, V) logits in memory."""
    return _in_chunks(hidden, weight, targets, softcap, z_loss, fused=False)


def fused_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None = None, z_loss: float = 0.0
) -> Tensor:
    """`chunked_cross_entropy` with one compiled pass over each chunk of logits, whether the model is compiled or not.

    Needs a compiler.
    """
    return _in_chunks(hidden, weight, targets, softcap, z_loss, fused=True)


def softcapped(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits z as c tanh(z / c), for the softcap c; None: as they are."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


LOSSES = {"plain": plain_cross_entropy, "chunked": chunked_cross_entropy, "fused": fused_cross_entropy}


def _in_chunks(
    hidden: Tensor, weight: Tensor, targets: Tensor, softcap: float | None, z_loss: float, fused: bool
) -> Tensor:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    # Computed here, because gradients are disabled inside the operation.
    needs_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    loss: Tensor
    if torch.compiler.is_compiling():
        # In a compiled model on a GPU, each chunk is compiled too.
        loss = _chunked(hidden, weight, targets, softcap, z_loss, needs_grad, fused or kind == "cuda")[0]
    else:
        loss = _Chunked.apply(  # type: ignore[no-untyped-call]
            hidden, weight, targets, softcap, z_loss, needs_grad, fused
        )
    return loss


def chunk_rows(tokens: int, device: str) -> int:
    """Number of rows of logits per chunk: at least 512 (on a GPU 4,096, to use all of it), or all if there are fewer.

    512 rows of 50,304 logits in float32 are 100 MB. With fewer rows a CPU with AMX rearranges the weight for every
    product, which then takes four to six times as long.
    """
    least = 4096 if device == "cuda" else 512
    return -(-tokens // max(1, tokens // least))


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if it exceeds the range of a float."""
    return math.exp(loss) if loss < 700 else math.inf


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """The loss in bits per byte of text, which makes tokenizers comparable; infinity if there is no text."""
    return loss / (math.log(2) * bytes_per_token) if bytes_per_token else math.inf


class _Chunked(torch.autograd.Function):
    """The loss in a model that is not compiled: no custom operation, whose first call would import the compiler."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        loss, *gradients = _loss_and_gradients(*arguments)
        ctx.save_for_backward(*gradients)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _scaled_gradients(ctx, grad)


@torch.library.custom_op("gptexp::chunked_cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_loss: float,
    needs_grad: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`_loss_and_gradients` as one opaque operation for the compiler.

    Otherwise the compiler would unroll the loop, take 3 s per chunk, and schedule all chunks at once, with all logits
    in memory.
    """
    return _loss_and_gradients(hidden, weight, targets, softcap, z_loss, needs_grad, fused)


@_chunked.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_loss: float,
    needs_grad: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    loss = hidden.new_empty((), dtype=torch.float32)
    if needs_grad:
        return loss, torch.empty_like(hidden), torch.empty_like(weight)
    return loss, hidden.new_empty(0), weight.new_empty(0)


def _keep_gradients(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # the gradients among the outputs are never differentiated
    ctx.save_for_backward(*output[1:])


def _scaled_gradients(ctx: Any, grad: Tensor, *_: None) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight = ctx.saved_tensors
    return grad_hidden * grad, grad_weight * grad, None, None, None, None, None


_chunked.register_autograd(once_differentiable(_scaled_gradients), setup_context=_keep_gradients)


def _loss_and_gradients(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    softcap: float | None,
    z_loss: float,
    needs_grad: bool,
    fused: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(mean loss, gradient of `hidden`, gradient of `weight`). The gradients are empty unless `needs_grad`.

    Products are in the type of `hidden`; the gradient of `weight` is summed over the chunks in float32. If `fused`, a
    chunk is compiled: on a GPU as a whole, on a CPU only the passes over its largest tensors.
    """
    hidden, low, on_cpu = hidden.detach(), weight.detach().to(hidden.dtype), hidden.device.type == "cpu"
    counted = targets != IGNORED
    of_mean = counted / counted.sum()  # a row's share of the mean
    targets = targets.clamp(min=0)
    loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
    grad_hidden = torch.empty_like(hidden) if needs_grad else hidden.new_empty(0)
    grad_weight = torch.zeros_like(low, dtype=torch.float32) if needs_grad else low.new_empty(0)
    # Cauchy-Schwarz bounds every logit. If exp of the bound does not overflow, the usual shift by the row's maximum is
    # not needed. It is two passes over the logits: on two AVX2 cores it makes this function 1.14 times as slow at width
    # 32, 1.06 at 128 and 1.01 at 768. On a GPU the comparison would wait for the device.
    shifted = not on_cpu or bool(hidden.norm(dim=1).max() * low.norm(dim=1).max() > SAFE_LOGIT)
    rows = chunk_rows(len(hidden), hidden.device.type)
    passes = _cpu_passes(rows, low, shifted, fused) if on_cpu else _gpu_passes(fused)
    chunk = compiled(_chunk, dynamic=False) if fused and not on_cpu else _chunk
    with torch.no_grad():
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            into = (grad_hidden[part], grad_weight) if needs_grad else None
            loss += chunk(hidden[part], low, targets[part, None], of_mean[part, None], softcap, z_loss, into, passes)
    return loss, grad_hidden, grad_weight.to(weight.dtype)


class _Passes(NamedTuple):
    """The functions that pass over the largest tensors of a chunk."""

    logits: Callable[[Tensor, Tensor], Tensor]  # the product of two matrices
    exps: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # `_exps`
    add: Callable[[Tensor, Tensor], Tensor]  # adds the second argument to the first


def _cpu_passes(rows: int, weight: Tensor, shifted: bool, fused: bool) -> _Passes:
    """The passes on a CPU, for the head `weight` (V, C): compiled if `fused`, else in place in kept buffers."""
    out = _buffer(rows, len(weight), weight.dtype)
    zeros = None if shifted else torch.zeros(rows, 1)

    def logits(h: Tensor, transposed: Tensor) -> Tensor:
        return torch.mm(h, transposed, out=out[: len(h)])

    def exps(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shift = None if zeros is None else zeros[: len(z)]
        return compiled(_exps, dynamic=True)(z, shift) if fused else _exps_in_place(z, shift, wide)

    wide = None if fused or weight.dtype == torch.float32 else _buffer(rows, len(weight), torch.float32)
    return _Passes(logits, exps, compiled(_add, dynamic=True) if fused else Tensor.add_)


def _gpu_passes(fused: bool) -> _Passes:
    """The passes on other devices. There torch's addition takes a single pass, whatever the operands' types."""
    return _Passes(torch.mm, _exps if fused else _exps_in_place, Tensor.add_)


@lru_cache(maxsize=1)
def _buffers(_rows: int, _vocab: int) -> dict[torch.dtype, Tensor]:
    """The buffers of `_buffer` for the newest shape; buffers of other shapes are freed."""
    return {}


def _buffer(rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    """A buffer on the CPU for the logits of one chunk, (R, V).

    Buffers are reused by every call: the page faults of new memory of this size take more time than the arithmetic,
    and freed buffers leave the heap fragmented.
    """
    kept = _buffers(rows, vocab)
    if dtype not in kept:
        with torch.inference_mode(False):  # tensors from inference mode cannot be used in training
            kept[dtype] = torch.empty((rows, vocab), dtype=dtype)
    return kept[dtype]


def _exps(logits: Tensor, unshifted: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(2^(logits - shift) in the type of `logits` (R, V), the sums of its rows (R, 1), the shift (R, 1)).

    The shift is `unshifted`, which is zeros; None: the row's maximum. Compiled for a CPU, this is one pass over the
    logits, but only because the sum is over the stored type, and because each row subtracts a value of its own, even if
    that is zero. Otherwise the compiler would make two passes, each with its own exp2.
    """
    shift = logits.float().amax(-1, keepdim=True) if unshifted is None else unshifted
    exps = (logits.float() - shift).exp2().to(logits.dtype)
    return exps, exps.float().sum(-1, keepdim=True), shift


def _exps_in_place(
    logits: Tensor, unshifted: Tensor | None = None, wide: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """`_exps` in the memory of `logits`, with sums of float32 numbers. `wide`: a float32 buffer; None: a new one."""
    values = logits.float() if wide is None else wide[: len(logits)].copy_(logits)
    shift = values.amax(-1, keepdim=True) if unshifted is None else unshifted
    if unshifted is None:
        values.sub_(shift)
    total = values.exp2_().sum(-1, keepdim=True)
    return (values if values.dtype == logits.dtype else logits.copy_(values)), total, shift


def _add(to: Tensor, product: Tensor) -> Tensor:
    """Add `product` to `to` (float32). If not compiled, torch on a CPU first converts a `product` of another type."""
    return to.add_(product)


def _chunk(
    h: Tensor,
    weight: Tensor,
    y: Tensor,
    of_mean: Tensor,
    softcap: float | None,
    z_loss: float,
    into: tuple[Tensor, Tensor] | None,
    passes: _Passes,
) -> Tensor:
    """The loss of the rows `h` (R, C) with targets `y` (R, 1), each times its share `of_mean` (R, 1), summed.

    The gradient of `h` is written to `into[0]`, and that of `weight` (V, C) is added to `into[1]`.
    """
    # Logits are in base 2, because a CPU computes exp2 almost twice as fast as exp: exp(z) = 2^(z · log2 e), and the
    # factor is applied to the smaller operand `h`. The softmax stays unnormalised: 1/sum is applied to the (R, C)
    # operands of the two products below and not to all V columns. Each of these saves a pass over the largest tensor.
    logits = passes.logits(h * LOG2_E, weight.T)
    slopes = None  # of the softcap
    if softcap is not None:
        logits.div_(softcap * LOG2_E).tanh_()
        slopes = 1 - logits.square()
        logits.mul_(softcap * LOG2_E)
    of_target = logits.gather(1, y).float()
    exps, total, shift = passes.exps(logits)
    loss = ((total.log2() + (shift - of_target)) * of_mean).sum() / LOG2_E
    if into is None:
        return loss
    grad_hidden, grad_weight = into
    scale, of_one = of_mean / total, of_mean  # factors of exps, and of the one at the target
    if z_loss:
        scale = scale * (1 + 2 * z_loss / LOG2_E * (total.log2() + shift))
    if slopes is not None:
        exps, of_one = exps * slopes, of_mean * slopes.gather(1, y)
    grad_hidden.copy_((exps @ weight) * scale - weight[y[:, 0]] * of_one)
    if weight.dtype == torch.float32:
        grad_weight.addmm_(exps.T, h * scale)
    else:
        passes.add(grad_weight, exps.T @ (h * scale).to(weight.dtype))
    grad_weight.index_add_(0, y[:, 0], (h * of_one).float(), alpha=-1)
    return loss
