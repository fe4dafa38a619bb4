"""What a training step eats: text, a tokenizer, committed lengths, batches, hub data sets.

Import the submodules by name: this package itself imports nothing.
"""
