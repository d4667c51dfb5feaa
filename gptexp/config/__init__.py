"""The configuration: keys and rules, composition by Hydra, arithmetic of batches, schedules and runs. No torch."""
