"""Losses as pure tensor functions, one file a trainer: import them by name."""
