"""Training of the demo model: data, tokenizer, training loop, export."""
