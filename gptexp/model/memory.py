"""Closed-form estimate of the memory of one rank's tensors at the peak of a step."""

import math
from dataclasses import dataclass, replace

from gptexp.config.parts import is_part
from gptexp.config.schema import ModelConfig
from gptexp.model.attention import chunks
from gptexp.model.loss import chunk_rows
from gptexp.model.optimizer_state import most_state_bytes, rows_of, state_bytes, update_bytes
from gptexp.model.shapes import block_parameters, count_parameters, linear_layers, parameter_shapes
from gptexp.optim.base import OptimConfig, in_block

Z_LOSS_BYTES = 20  # of a logit, for the plain loss with train.z_loss


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors of one rank at the peak of a step."""

    weights: int  # float32
    average: int  # average of the weights, float32; 0 without train.ema_half_life_tokens
    optimizer: int  # the moments and whatever else the optimizer keeps, float32
    gradients: int  # float32; those that exist at the peak
    gathered: int  # parameters that FSDP2 has made whole at the peak, and its buffers; 0 unless world.sharding=full
    activations: int  # kept for the backward pass, and the copies of the weights in the compute type
    loss: int  # the logits and the tensors that are computed from them
    fragmentation: int  # of a CPU's heap: free memory in blocks that are too small to be used

    @property
    def peak(self) -> int:
        return self.tensors + self.fragmentation

    @property
    def tensors(self) -> int:
        state = self.weights + self.average + self.optimizer
        return state + self.gradients + self.gathered + self.activations + self.loss


@dataclass(frozen=True)
class StepShape:
    """The settings, besides the model, that determine the sizes of a step's tensors."""

    micro_batch_size: int  # B, sequences
    seq_len: int  # T, tokens
    grad_accum_steps: int
    world_size: int
    device: str  # cuda, mps or cpu
    dtype: str  # float32 or bfloat16
    compiled: bool
    loss: str  # plain, chunked or fused
    activation_checkpointing: int  # n: every n-th block keeps only its input; 0: none
    attention: str = "flash"  # train.attention
    tree: bool = False  # train.reduction=tree
    averaged: bool = False  # train.ema_half_life_tokens
    sharding: str = "none"  # world.sharding
    reduce_every: str = "step"  # for sharding=full: step or micro_step
    comm: str = "float32"  # world.comm
    z_loss: bool = False  # train.z_loss
    document_mask: bool = False  # data.document_mask

    @property
    def tokens(self) -> int:
        """The tokens of a micro-batch."""
        return self.micro_batch_size * self.seq_len

    @property
    def bytes_per_number(self) -> int:
        """Bytes of a number in the type in which the model computes."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def is_split(self) -> bool:
        """Whether each rank has a part of the parameters."""
        return self.sharding == "full" and self.world_size > 1


@dataclass(frozen=True)
class _Parts:
    """Bytes of what a step keeps for its backward pass or computes in it, on one rank."""

    kept: int  # the inputs and activations of all blocks, and the masks of attention
    around: int  # the final norm and the token ids
    in_block: int  # the activations of one block, and the masks
    in_layer: int  # beside `kept`, in a block's backward pass: recomputed activations, temporary gradients
    in_last: int  # of `kept`, the activations of the last block, unless they are recomputed
    loss: int
    scratch: int  # buffers of the loss, kept from step to step


# Bytes at one moment of a step: gradients, gathered parameters, activations, loss.
_Moment = tuple[int, int, int, int]


def memory_estimate(m: ModelConfig, optim: OptimConfig, step: StepShape) -> Memory:
    """Estimate the memory of a step without dropout.

    The peak is at one of these points: after the backward pass of the loss, when all activations exist; with activation
    checkpointing, after the recomputation of the last block; at the end of the backward pass, when all gradients exist
    and an embedding that is also the head has a second one; in the update, whose temporary tensors take the place of
    the activations. The activations of a model of the user's own are unknown, and count 0.
    """
    if is_part(m):
        weights, state = 4 * count_parameters(m), state_bytes(optim, m)
        average = weights if step.averaged else 0
        return Memory(weights, average, state, weights, gathered=0, activations=0, loss=0, fragmentation=0)
    parts, weights = _parts(m, step), 4 * count_parameters(m)
    if step.is_split:
        moments = _split_moments(m, optim, step, parts)
        state, weights = state_bytes(optim, m, step.world_size), _own_bytes(m, step)
    else:
        moments = _whole_moments(m, optim, step, parts)
        shared = step.sharding == "optimizer" and step.world_size > 1
        state = most_state_bytes(optim, m, step.world_size) if shared else state_bytes(optim, m)
    gradients, gathered, activations, loss = max(moments, key=sum)
    average = weights if step.averaged else 0
    tensors = Memory(weights, average, state, gradients, gathered, activations, loss, fragmentation=0)
    if step.device != "cpu":
        return tensors
    # A quarter of the other tensors (measured: 0 to a half). Small tensors partly reuse the blocks of memory that full
    # logits leave, so the next logits do not fit into these.
    of_logits = loss if step.loss == "plain" and not step.compiled else loss // 4
    return replace(tensors, fragmentation=(tensors.tensors - loss) // 4 + of_logits)


def _parts(m: ModelConfig, step: StepShape) -> _Parts:
    """Sizes of activations and loss."""
    c, vocab, tokens, width = m.n_embd, m.resolved_vocab_size, step.tokens, step.bytes_per_number
    in_block = tokens * _token_in_block(m, step)
    if step.attention == "math":  # the scores: their softmax in float32, and in the compute type if it differs
        in_block += tokens * m.n_head * step.seq_len * (4 if width == 4 else 6)
    every = step.activation_checkpointing
    recomputed = len(range(0, m.n_layer, every)) if every else 0
    kept = recomputed * tokens * 4 * c + (m.n_layer - recomputed) * in_block
    scratch, compiles_loss = 0, step.compiled and not step.is_split  # of a split model only blocks are compiled
    if step.loss != "plain":
        # A chunk's logits in float32, and in the compute type if it differs. Compiled: twice in the compute type. Then
        # two gradients, each before and after it is scaled; that of the weight is in float32, then in its own type.
        compiled = step.loss == "fused" or (compiles_loss and step.device != "cpu")
        bytes_per_logit = 2 * width if compiled else 6 if step.dtype == "bfloat16" else 4
        capped = 2 * width if m.logit_softcap else 0  # the slopes of the cap, and their product with the softmax
        logits = chunk_rows(tokens, step.device) * vocab
        scratch, gradients = logits * bytes_per_logit, (4 + (width if step.is_split else 4)) * vocab * c
        loss = scratch + logits * capped + gradients + 2 * tokens * c * width
    else:
        # Compiled: the logits in the compute type, and on a CPU their gradient beside them; a GPU writes it over them.
        # Else in float32: the log-softmax, the gradient of the gathered entries and the gradient of the logits.
        compiled_width = 2 * width if step.device == "cpu" else width
        capped = width if m.logit_softcap else 0  # the hyperbolic tangent
        eager = Z_LOSS_BYTES if step.z_loss else 12
        loss = tokens * vocab * (compiled_width if compiles_loss else eager + capped)
    # If the last block is not recomputed, its activations are freed before others take their place.
    recomputes_last = every > 0 and (m.n_layer - 1) % every == 0
    in_layer, in_last = (in_block, 0) if recomputes_last else (0, in_block)
    if recomputed or step.is_split:
        in_layer += tokens * m.mlp_size * width  # the gradient of the hidden layer
    if in_layer and not step.compiled and m.mlp == "relu2":
        in_layer += 2 * tokens * m.mlp_size * width  # twice its activation, and that times this gradient
    if in_layer and _has_norm_of_parts(m, step):
        in_layer += tokens * 4 * c  # its gradient in float32
    around = tokens * (4 * c + width * c + 24)
    masks, scratch = _mask_bytes(m, step), scratch if step.device == "cpu" else 0
    return _Parts(kept + masks, around, in_block + masks, in_layer, in_last, loss, scratch)


def _mask_bytes(m: ModelConfig, step: StepShape) -> int:
    """Bytes of the masks of attention, of which each kind of window has one for all its blocks."""
    if step.attention == "flex":  # a few bytes for each block of 128 queries and 128 keys
        return 0
    windows = {m.window_of(number) for number in range(m.n_layer)}
    numbers, t = 0, step.seq_len
    for window in windows:
        if step.document_mask or (window or t) < t:
            numbers += sum((end - first) * (end - start) for start, first, end in chunks(t, window))
    return numbers * step.bytes_per_number * (step.micro_batch_size if step.document_mask else 1)


def _token_in_block(m: ModelConfig, step: StepShape) -> int:
    """Bytes that a block keeps of a token for its backward pass.

    Norms before the branches keep the residual stream in float32; without them the first products keep it, in the
    compute type. In that type are the inputs of the branches (2·C), queries, keys and values, the output of attention,
    and the MLP before and after its activation, or a gate's two factors and their product too; a compiled gate keeps no
    activation. Attention keeps a float32 number for each head.
    """
    c, width, norms = m.n_embd, step.bytes_per_number, 2 * _norm_bytes(m, step, m.n_embd, is_stream=False)
    queries, keys = m.n_head * m.head_size, m.kv_heads * m.head_size
    numbers = 2 * queries + 2 * keys + m.mlp_size * (4 - step.compiled if m.has_gate else 2)
    if step.attention != "flex" and (m.window is not None or step.document_mask):
        numbers += queries  # the outputs of the chunks of queries, beside what they are joined to
    kept = 4 * m.n_head
    if m.residual_norm != "post":
        kept += 8 * c + 2 * c * width + 2 * _norm_bytes(m, step, c, is_stream=True)
    else:
        kept += 2 * c * width  # in float32, the residual stream itself
    if m.residual_norm != "pre":
        kept += norms
    if m.qk_norm != "none":
        for heads, size in ((m.n_head, queries), (m.kv_heads, keys)):
            rows = heads if m.qk_norm == "head" else 1
            kept += rows * _norm_bytes(m, step, size // rows, is_stream=False)
    return kept + width * numbers


def _norm_bytes(m: ModelConfig, step: StepShape, numbers: int, is_stream: bool) -> int:
    """Bytes that a norm keeps of a row of `numbers`, but for the residual stream (`is_stream`), which others keep too.

    On a CPU torch's RMSNorm, unless it is compiled, also keeps its input in float32, and its result before the weight.
    """
    of_parts = _has_norm_of_parts(m, step)
    width = 4 if of_parts else step.bytes_per_number
    rows = 8 if m.norm == "layernorm" or of_parts else 4
    return rows + numbers * ((0 if is_stream else width) + (4 if of_parts and m.norm_weight else 0))


def _has_norm_of_parts(m: ModelConfig, step: StepShape) -> bool:
    """Whether torch computes each norm as several operations."""
    return m.norm == "rmsnorm" and step.device == "cpu" and not step.compiled


def _whole_moments(m: ModelConfig, optim: OptimConfig, step: StepShape, parts: _Parts) -> list[_Moment]:
    """The moments of a model that each rank has whole.

    With several ranks the gradients are in DDP's buckets, which are never freed. `comm=bfloat16` adds a copy of each
    gradient that is being sent: on a slow network, of all but the embedding's. A tree reduction holds up to
    log2(grad_accum_steps) partial sums during a micro-step, and two more copies while ranks exchange their sums.
    """
    c, vocab, weights, several = m.n_embd, m.resolved_vocab_size, 4 * count_parameters(m), step.world_size > 1
    products = sum(inputs * outputs * count for inputs, outputs, count in linear_layers(m).values())
    copies = 2 * products if step.dtype == "bfloat16" else 0
    waiting = weights * (step.grad_accum_steps.bit_length() - 1) if step.tree else 0
    accumulated = waiting if step.tree else weights if step.grad_accum_steps > 1 or several else 0
    sent = weights // 2 - 2 * vocab * c if several and step.comm == "bfloat16" else 0
    moments = [
        (accumulated, 0, parts.kept + copies + parts.around, parts.loss),
        (
            waiting + weights + (8 if m.tied else 4 if accumulated else 0) * vocab * c + sent,
            0,
            parts.in_block,
            parts.scratch,
        ),
        (weights + update_bytes(optim, m), 0, 0, parts.scratch),
    ]
    if step.tree and several:
        moments.append((3 * weights, 0, 0, parts.scratch))
    if parts.in_layer:
        moments.append((accumulated + 4 * vocab * c, 0, parts.kept + parts.in_layer, parts.scratch))
    return moments


def _split_moments(m: ModelConfig, optim: OptimConfig, step: StepShape, parts: _Parts) -> list[_Moment]:
    """The moments of a model that FSDP2 has split over ranks; they reduce a block's gradients in the type `comm`."""
    c, vocab, own, width = m.n_embd, m.resolved_vocab_size, _own_bytes(m, step), step.bytes_per_number
    block = block_parameters(m)
    root = count_parameters(m) - m.n_layer * block
    accumulated, new = 0, width * block  # gradients of earlier micro-steps, and those of a block
    if step.grad_accum_steps > 1:
        accumulated = own
        if step.reduce_every == "step":  # new ones are added one by one
            largest = max(math.prod(shape) for name, shape, _ in parameter_shapes(m) if in_block(name))
            accumulated, new = 4 * count_parameters(m), width * largest
    sent = 2 if step.comm == "bfloat16" else 4
    # Gathered are the parameters of the root and of the next block, then also of the current block. Of the root's
    # gradients, only that of a tied head waits, for the backward pass of the embedding.
    at_end = accumulated + width * vocab * c + new
    # When a block has all its gradients, its activations are free.
    left = parts.kept - parts.in_last + parts.in_layer
    return [
        (accumulated, width * (root + block), parts.kept + parts.around, parts.loss),
        (at_end, width * (root + 2 * block) + sent * block, left, parts.scratch),
        (own, (sent + width) * root, 0, parts.scratch),
        (own + update_bytes(optim, m), 0, 0, parts.scratch),
    ]


def _own_bytes(m: ModelConfig, step: StepShape) -> int:
    """Bytes of the rows of the parameters that a rank has, in float32."""
    return 4 * sum(count * math.prod(rows_of(shape, step.world_size)) for _, shape, count in parameter_shapes(m))
