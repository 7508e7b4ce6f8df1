"""One run on several processes, its ranks: each trains some of the leaves, on a GPU of its own
where there are GPUs.

The leaves are dealt out in the tree's order (`assignment`). A rank holds the rows of its leaves and
of their ancestors, as a tree of its own (`subtree`), and the federation on it works as on any tree:
only the means of parents whose children lie on several ranks are added up across them.
"""
