"""What every benchmark needs: a header, a model, options, a terminal, files of results, and how a run ends."""
