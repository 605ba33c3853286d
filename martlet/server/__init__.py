"""The model behind HTTP: the APIs of OpenAI and Anthropic, streaming, limits, metrics (read `app.py` next)."""
