"""Real servers side by side: starting them, asking them, comparing their answers and showing what came of it."""
