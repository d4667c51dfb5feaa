"""From a command line to a run: composes the config with Hydra, then trains in this process or in new ones."""
