"""What transformers makes of an exported directory, as JSON: python tests/judge.py DIRECTORY TEXT

The version, the ids of TEXT and the text that these stand for, the logits after the ids 0, 1, 2, … as many as the model
sees, and the ids that greedy generation adds to TEXT.
"""

import json
import sys

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def judge(directory: str, text: str, new_tokens: int = 12) -> dict[str, object]:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = tokenizer(text, return_tensors="pt")
    first = torch.arange(model.config.max_position_embeddings)[None] % model.config.vocab_size
    with torch.no_grad():
        logits = model(first).logits[0]
        added = model.generate(**ids, max_new_tokens=new_tokens, do_sample=False)[0, ids["input_ids"].shape[1] :]
    return {
        "version": transformers.__version__,
        "ids": ids["input_ids"][0].tolist(),
        "text": tokenizer.decode(ids["input_ids"][0]),
        "logits": logits.tolist(),
        "added": added.tolist(),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
    }


if __name__ == "__main__":
    print(json.dumps(judge(*sys.argv[1:])))
