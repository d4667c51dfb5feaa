"""The training step, the training loop, validation and measurements. No Hydra, no wandb."""
