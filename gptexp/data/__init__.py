"""Text -> tokens -> token files -> batches.

corpora.py finds the text. prepare.py tokenises it once into the files of shards.py. order.py determines the order of
the windows. loader.py converts windows to tensors.
"""
