"""What bytes mean: row formats, number codecs, checkpoint files."""
