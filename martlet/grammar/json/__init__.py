"""JSON Schema as a language: nodes, goals, writers, states (see ../README.md)."""
