"""A run on the disk: what it is made of, written whole or not at all, and taken up again."""
