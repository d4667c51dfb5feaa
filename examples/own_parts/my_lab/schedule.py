"""Stairs: the learning rate falls by a factor, several times, at equal distances."""


def stairs(tokens: int, warmup_tokens: int, decay_tokens: int, factor: float = 0.5, times: int = 4) -> float:
    done = (tokens - warmup_tokens) / max(1, decay_tokens - warmup_tokens)
    return factor ** min(times, int(done * (times + 1)))
