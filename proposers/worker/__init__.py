"""A head in a worker, on either model runner: loaded, under a grammar, given up where it fails, counted."""
