"""Ways to divide a data set over a tree, and how unlike the parts are."""
