"""The HTTP server: OpenAI's and Anthropic's APIs, streams, limits, metrics (read `app.py` next)."""
