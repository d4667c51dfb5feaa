"""Accuracy: how often the right next token is among the `k` with the highest logits."""

import torch


def accuracy(model: torch.nn.Module, tokenizer, batches, k: int = 1) -> float:
    hits = tokens = 0
    for x, y in batches:
        best = model(x).topk(k).indices  # (B, T, k)
        hits += (best == y[..., None]).any(-1).sum().item()
        tokens += y.numel()
    return hits / tokens
