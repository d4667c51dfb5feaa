"""An LSTM of several layers (Hochreiter and Schmidhuber 1997) as a language model."""

from torch import Tensor, nn


class LSTM(nn.Module):
    def __init__(
        self, vocab_size: int, block_size: int, width: int = 128, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocab_size, bias=False)
        self.head.weight = self.embedding.weight
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(self.embedding(x))
        return self.head(y)
