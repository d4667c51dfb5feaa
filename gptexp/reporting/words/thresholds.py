"""The widths and differences that a report takes as small. No numpy, for which `gptexp report --help` does not wait."""

WITHIN = 0.5  # an interval with at most so many octaves on each side is narrow enough, unless asked otherwise
NARROWEST_WITHIN = 0.06  # no interval is narrower than 0.1 octaves, and a search stops at 0.9 times what is asked
BEHIND_NATS = 0.05  # an arm is behind if its loss is higher by this, unless asked otherwise; see `arms.falls_behind`
