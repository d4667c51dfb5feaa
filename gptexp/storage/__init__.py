"""Files of a run: its directory, its checkpoints, and the state that the checkpoints hold."""
