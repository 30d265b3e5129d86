"""Who owns which rows, in memory: packed pools of compressed rows, window rings, sequence state."""
