"""Sequences over time: phases, sampling, generation. Speaks token ids."""
