"""The logs of a run: metrics.jsonl, the terminal, wandb, and alerts."""
