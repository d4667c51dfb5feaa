"""The analysis in sentences, and what to run next."""
