"""GPT-2, its loss, text generation, and closed forms of its parameters, FLOPs and memory."""
