"""JSON Schema as a language: schemas to nodes, nodes to types, types to states (read
`schema_nodes.py` first).
"""
