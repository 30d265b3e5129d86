"""Text in, token ids out, and back: tokenizer, streaming detokenizer, stop strings. No torch."""
