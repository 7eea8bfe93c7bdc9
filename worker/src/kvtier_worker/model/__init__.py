"""Llama-family decoders on torch."""
