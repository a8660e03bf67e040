"""What only a GPU can show: ``run.py`` runs all of it."""
