"""Models: shapes by hub name, building without weights, loading with them, attention."""
