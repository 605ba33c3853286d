"""What the engine did: recorded, drawn, replayed (read `recorder.py` next)."""
