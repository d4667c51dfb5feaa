"""Text -> tokens -> shards -> batches.

corpora.py finds the text, prepare.py tokenises it once into shards.py's files, order.py says which window comes
when, loader.py turns windows into tensors.
"""
