"""What one rank's tensors take at the peak of a step, in closed form."""

from dataclasses import dataclass, replace

from gptexp.config import ModelConfig
from gptexp.flops import count_parameters
from gptexp.loss import chunk_rows


@dataclass(frozen=True)
class Memory:
    """Bytes of the tensors on one rank when a step needs the most of them."""

    weights: int  # float32
    optimizer: int  # AdamW's two moments, float32
    gradients: int  # float32; what of them is there at the peak
    activations: int  # kept for the backward pass, with the compute type's copies of the weights
    loss: int  # the logits and what is computed from them
    fragmentation: int  # of a CPU's heap: free, but in pieces that nothing fits into

    @property
    def peak(self) -> int:
        return self.tensors + self.fragmentation

    @property
    def tensors(self) -> int:
        return self.weights + self.optimizer + self.gradients + self.activations + self.loss


def memory_estimate(
    m: ModelConfig,
    *,
    micro_batch_size: int,
    seq_len: int,
    grad_accum_steps: int,
    world_size: int,
    device: str,
    dtype: str,
    compiled: bool,
    loss: str,
    activation_checkpointing: bool,
    tree: bool = False,
) -> Memory:
    """Count the tensors of a step without dropout; `tree`: `train.reduction`.

    On several ranks gradients lie in DDP's buckets, which stay. A tree has up to log2(grad_accum_steps) sums waiting
    for their neighbours while a micro-step runs, and two more copies while ranks exchange theirs.

    A block keeps, per token, its two residual inputs in float32 and 14·C numbers in the compute type: two normalised
    inputs (2·C), queries, keys and values (3·C), attention's output (C), the MLP before and after its GELU (8·C);
    besides H + 4 float32 numbers of attention and LayerNorms. The peak is where the loss has just been differentiated,
    with all activations there; or, checkpointed, where the last block has been computed again; or at the end of the
    backward pass, with all gradients there and the embedding's coming as a second tensor beside the head's.
    """
    c, vocab, tokens = m.n_embd, m.vocab_size, micro_batch_size * seq_len
    width = 2 if dtype == "bfloat16" else 4
    weights = 4 * count_parameters(m)
    in_block = tokens * (8 * c + 14 * c * width + 4 * m.n_head + 16)
    kept = m.n_layer * (tokens * 4 * c if activation_checkpointing else in_block)
    copies = 2 * (12 * c * c * m.n_layer + vocab * c) if dtype == "bfloat16" else 0
    around = tokens * (4 * c + width * c + 24)  # the final LayerNorm; token ids
    scratch = 0
    if loss == "chunked":
        # The rows' logits in float32, and in the compute type if that is another; compiled, which on a CPU they never
        # are, twice in the compute type. Then both gradients, first as computed (the weight's in float32), then as
        # handed on.
        of_row = 2 * width if compiled and device != "cpu" else 6 if dtype == "bfloat16" else 4
        scratch = chunk_rows(tokens, device) * vocab * of_row
        of_loss = scratch + (4 + width) * vocab * c + 2 * tokens * c * width
    else:
        # Compiled: the logits and their gradient, in the compute type. Else, all in float32: log-softmax, the gradient
        # of the picked entries, and that of the logits.
        of_loss = tokens * vocab * (2 * width if compiled else 12)
    kept_scratch = scratch if device == "cpu" else 0
    waiting = weights * (grad_accum_steps.bit_length() - 1) if tree else 0
    accumulated = waiting if tree else weights if grad_accum_steps > 1 or world_size > 1 else 0
    points = [
        (accumulated, kept + copies + around, of_loss),
        (waiting + weights + 8 * vocab * c, in_block, kept_scratch),
    ]
    if tree and world_size > 1:
        points.append((3 * weights, 0, kept_scratch))
    if activation_checkpointing:
        in_mlp = tokens * 4 * c * width  # the gradient of its hidden layer
        points.append((accumulated + 4 * vocab * c, kept + in_block + in_mlp, kept_scratch))
    gradients, activations, of_loss = max(points, key=sum)
    tensors = Memory(weights, 2 * weights, gradients, activations, of_loss, fragmentation=0)
    if device != "cpu":
        return tensors
    # A quarter of the rest (measured: 0 to a half), and what whole logits leave, whose own holes small tensors bite
    # into before they come again.
    whole_logits = of_loss if loss == "plain" and not compiled else of_loss // 4
    return replace(tensors, fragmentation=(tensors.tensors - of_loss) // 4 + whole_logits)
