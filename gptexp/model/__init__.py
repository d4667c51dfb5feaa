"""GPT-2 and the blocks of today, their loss, text generation, and closed forms of its parameters, FLOPs and memory."""
