"""One file a technique, each of which can be lifted out: import them by name."""
