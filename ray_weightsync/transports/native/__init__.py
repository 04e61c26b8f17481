"""Rounds whose bytes are carried by one of vLLM's own weight-transfer backends, under this package's guard."""
