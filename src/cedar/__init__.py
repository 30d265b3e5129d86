"""cedar: Causal Encoder-Decoder with Attention Reuse."""
