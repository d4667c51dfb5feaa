"""A block without attention: a causal convolution over the last tokens, then a gated MLP."""

import torch.nn.functional as F
from torch import Tensor, nn


class ConvBlock(nn.Module):
    def __init__(self, n_embd: int, block_size: int, kernel: int = 8, widening: float = 2.0) -> None:
        super().__init__()
        width = round(widening * n_embd)
        self.norm_1, self.norm_2 = nn.RMSNorm(n_embd), nn.RMSNorm(n_embd)
        self.conv = nn.Conv1d(n_embd, n_embd, kernel)
        self.up, self.down = nn.Linear(n_embd, 2 * width, bias=False), nn.Linear(width, n_embd, bias=False)
        self.kernel = kernel

    def forward(self, x: Tensor) -> Tensor:
        past = F.pad(self.norm_1(x).mT, (self.kernel - 1, 0))  # (B, C, T + kernel - 1): no later token
        x = x + self.conv(past).mT
        gate, value = self.up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * value)
