"""One run over several processes, each with a part of the tree."""
