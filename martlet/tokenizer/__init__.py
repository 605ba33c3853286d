"""Text to tokens and back: byte-level BPE, SentencePiece, chat templates, streaming.

Read `tokenizer.py` first.
"""
