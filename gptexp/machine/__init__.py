"""The hardware of this machine, and the choice of a value for every `auto` of a config."""
