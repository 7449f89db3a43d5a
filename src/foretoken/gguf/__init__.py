"""GGUF files (llama.cpp's format) as what transformers reads: a configuration, a tokenizer and weights.

The format of the file itself, and of its quantised blocks, is the business of the library `gguf`.
"""
